# The image of `axon launch --jobset` and `--skypilot`, and of any container that trains.
#
#   docker build -t registry.example.com/axon:1 .                         # NVIDIA GPUs
#   docker build -t registry.example.com/axon:1 --build-arg EXTRAS=tpu .  # TPUs
#
# CUDA, cuDNN and NCCL are in the Python packages that the extra installs; the node brings the driver.
FROM python:3.13-slim

ARG EXTRAS=cuda,tokenizers,hub

# ssh is for `axon launch --hosts`; nothing else needs it.
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-client \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/axon
COPY pyproject.toml README.md LICENSE ./
COPY axon_dist ./axon_dist
RUN pip install --no-cache-dir ".[${EXTRAS}]"
COPY configs ./configs

# Python must not hold back the last lines of a process that is killed.
ENV PYTHONUNBUFFERED=1
CMD ["axon", "doctor"]
