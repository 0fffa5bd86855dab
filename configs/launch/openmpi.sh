#!/usr/bin/env bash
# Two hosts with eight GPUs each, one process per GPU. Open MPI only starts the processes; they talk
# through JAX. Version 4 tells them where rank 0 is; later versions do not, so MASTER_ADDR does.
# Run it again after 75 or 76: it goes on from the newest checkpoint in RUN_DIR, which both hosts see.
set -euo pipefail
export MASTER_ADDR="${MASTER_ADDR:?the host of rank 0, the first below}" MASTER_PORT=29500
mpirun -np 16 --host "$MASTER_ADDR:8,${OTHER_HOST:?the second host}:8" \
  -x MASTER_ADDR -x MASTER_PORT -x PATH \
  axon train configs/fsdp8.yaml devices.emulate=null mesh.fsdp=-1 train.global_batch=64 \
  --resume auto run_dir="${RUN_DIR:?a folder that both hosts see}"
