#!/usr/bin/env bash
# Any launcher that sets MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK and LOCAL_RANK will do; here two
# hosts with eight GPUs each, one process per GPU. Run it on both, with NODE_RANK=0 and NODE_RANK=1.
#
# axon brings a launcher of its own, so torch need not be installed:
set -euo pipefail
axon launch -n 8 --nnodes 2 --node-rank "${NODE_RANK:?0 or 1}" \
  --master-addr "${MASTER_ADDR:?the host of node 0}" --master-port 29500 \
  --max-restarts 3 -- axon train configs/fsdp8.yaml devices.emulate=null mesh.fsdp=-1 \
  train.global_batch=64 --resume auto run_dir="${RUN_DIR:?a folder that both hosts see}"

# The same with torchrun, whose own store takes port 29500, so that axon listens on 29501:
#
#   torchrun --nnodes 2 --nproc-per-node 8 --node-rank "$NODE_RANK" \
#     --master-addr "$MASTER_ADDR" --master-port 29500 \
#     --no-python axon train configs/fsdp8.yaml devices.emulate=null mesh.fsdp=-1 \
#     train.global_batch=64 --resume auto run_dir="$RUN_DIR"
#
# One process per host that takes all of its GPUs, as is usual with JAX, is `-n 1`.
