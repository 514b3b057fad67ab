#!/bin/bash
# Scan a model on several nodes of Slurm: each node runs Ray, the first one runs headscan and writes the store.
# Edit the lines of SBATCH and the variables, and submit: sbatch slurm.sh
# After a time limit, submit it again: the scan continues at the first missing shard.
#SBATCH --job-name=headscan
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=08:00:00

MODEL=meta-llama/Llama-3.1-70B    # a name on the hub, or a folder that every node sees
CORPUS=corpus/
MAX_TOKENS=8192
STORE=scan.duckdb                 # on a disk of the first node, or on a file system with locks
PORT=6379

set -euo pipefail
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${nodes[0]}
others=$((${#nodes[@]} - 1))
srun --nodes=1 --ntasks=1 --nodelist="$first" ray start --head --port="$PORT" --block &
sleep 20
if ((others > 0)); then
  srun --nodes="$others" --ntasks="$others" --exclude="$first" ray start --address="$first:$PORT" --block &
  sleep 20
fi
srun --overlap --nodes=1 --ntasks=1 --nodelist="$first" \
  headscan scan "$MODEL" --corpus "$CORPUS" --max-tokens "$MAX_TOKENS" --ray-address "$first:$PORT" --store "$STORE"
