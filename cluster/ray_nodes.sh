#!/bin/bash
# Scan a model on machines without a scheduler. Edit the variables, and start it on the first machine, which needs SSH to
# the others: bash ray_nodes.sh
# headscan is installed at the same place on every machine. If the command ends, start it again: the scan continues.

MODEL=meta-llama/Llama-3.1-70B    # a name on the hub, or a folder that every machine sees
CORPUS=corpus/
MAX_TOKENS=8192
STORE=scan.duckdb                 # on a disk of the first machine
FIRST=node1                       # name of the first machine, as the others reach it
OTHERS="node2 node3"
PORT=6379
TOKEN_FILE=                       # of `ray get-auth-token --generate`, at the same path everywhere; empty: no token

set -euo pipefail
ray=$(command -v ray)
access=()
if [[ -n "$TOKEN_FILE" ]]; then
  access=(RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$TOKEN_FILE")
  export "${access[@]}"
fi
stop() {
  for machine in $OTHERS; do ssh "$machine" "$ray" stop || true; done
  "$ray" stop
}
"$ray" start --head --port="$PORT"
trap stop EXIT
for machine in $OTHERS; do
  ssh "$machine" env "${access[@]}" "$ray" start --address="$FIRST:$PORT"
done
headscan scan "$MODEL" --corpus "$CORPUS" --max-tokens "$MAX_TOKENS" --ray-address "$FIRST:$PORT" --store "$STORE"
