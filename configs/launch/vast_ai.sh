#!/usr/bin/env bash
# vast.ai: the start script of an instance. A single instance needs nothing: without any variable
# the run is one process that takes all GPUs. For several, set these in each of them; the port of
# rank 0 must be open to the others. Instances share no disk, so several also need RUN_DIR, in a
# bucket such as s3://bucket/runs/fsdp.
set -euo pipefail
export WORLD_SIZE="${WORLD_SIZE:-1}" RANK="${RANK:-0}"
export MASTER_ADDR="${MASTER_ADDR:-localhost}" MASTER_PORT="${MASTER_PORT:-29500}"
axon train configs/fsdp8.yaml devices.emulate=null mesh.fsdp=-1 \
  train.global_batch=64 --resume auto run_dir="${RUN_DIR:-/workspace/run}"
