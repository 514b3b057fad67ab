#!/bin/bash
# Scan a model that fits on one node with independent jobs of Slurm, which need no Ray. Each scans every PARTS-th shard
# into a store of its own, and a last job merges the stores.
# Edit the lines of SBATCH and the variables, and start it on a login node: bash slurm_array.sh
# Started again, it does only what is missing.
#SBATCH --job-name=headscan
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=08:00:00
#SBATCH --requeue

MODEL=meta-llama/Llama-3.1-8B     # a name on the hub, or a folder that every node sees
CORPUS=corpus/
MAX_TOKENS=8192
PARTS=8
SHARD_SIZE=16                     # sequences of a shard
STORES=stores                     # a folder that every node sees, without spaces in its name

set -euo pipefail
if [[ -z "${SLURM_ARRAY_TASK_ID:-}" ]]; then
  mkdir -p "$STORES"
  jobs=$(sbatch --parsable --array="1-$PARTS" "$0")
  sbatch --job-name=headscan-merge --dependency="afterok:$jobs" \
    --wrap="headscan merge $STORES/part*.duckdb --into $STORES/all.duckdb"
else
  srun headscan scan "$MODEL" --corpus "$CORPUS" --max-tokens "$MAX_TOKENS" --shard-size "$SHARD_SIZE" \
    --part "$SLURM_ARRAY_TASK_ID/$PARTS" --store "$STORES/part$SLURM_ARRAY_TASK_ID.duckdb"
fi
