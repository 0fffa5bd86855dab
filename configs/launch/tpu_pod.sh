#!/usr/bin/env bash
# A TPU pod slice: the same command on every host, which gcloud starts. AXON_CLUSTER tells that this
# is a run of several hosts; jax.distributed then asks the metadata server for the others. On GKE,
# where TPU_WORKER_HOSTNAMES is set, even that is not needed. Run it again after a host was lost or the
# slice was preempted: it goes on from the newest checkpoint in RUN_DIR, a bucket that all hosts see.
set -euo pipefail
gcloud compute tpus tpu-vm ssh "${TPU_NAME:?}" --zone "${ZONE:?}" --worker all --command \
  "cd axon && AXON_CLUSTER=gcetpu .venv/bin/\
axon train configs/fsdp8.yaml devices.emulate=null mesh.fsdp=-1 train.global_batch=64 \
  --resume auto run_dir=${RUN_DIR:?such as gs://bucket/runs/fsdp}"
