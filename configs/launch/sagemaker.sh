#!/usr/bin/env bash
# What each host runs; see sagemaker.py.
set -euo pipefail
axon train fsdp8.yaml devices.emulate=null mesh.fsdp=-1 \
  train.global_batch=64 --resume auto run_dir=/opt/ml/checkpoints/run
