#!/usr/bin/env bash
# What each host runs; see sagemaker.py. /opt/ml/checkpoints is a disk of each host, which the others
# do not see, so the run is in a bucket.
set -euo pipefail
axon train fsdp8.yaml devices.emulate=null mesh.fsdp=-1 \
  train.global_batch=64 --resume auto run_dir="${RUN_DIR:?such as s3://bucket/runs/fsdp}"
