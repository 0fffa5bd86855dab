"""Trains on a Ray cluster: one process per node, which takes all GPUs of the node.

    python configs/launch/ray_train.py NODES GPUS

Ray only places the processes; they connect through `jax.distributed`. A run starts again after 75
(a signal ended it and its state is saved) and, ten times at most, after 76 (a process was lost).
"""

import os
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

PORT = 29500
MOST_RESTARTS = 10
COMMAND = [
    *("axon", "train", "configs/fsdp8.yaml", "devices.emulate=null", "mesh.fsdp=-1"),
    *("train.global_batch=64", "--resume", "auto", "run_dir=/shared/runs/fsdp"),
]


def address() -> str:
    """Returns the address of this node that the others reach."""
    # /etc/hosts may map the own name to a loopback address, so the name is not asked.
    return ray.util.get_node_ip_address()


def train(rank: int, count: int, first: str) -> int:
    """Runs the command as one of `count` processes; returns its exit code."""
    env = {
        **os.environ,
        "MASTER_ADDR": first,
        "MASTER_PORT": str(PORT),
        "WORLD_SIZE": str(count),
        "RANK": str(rank),
    }
    return subprocess.run(COMMAND, env=env).returncode


def main(nodes: int, gpus: int) -> int:
    """Starts the processes until the run is done; returns the exit code."""
    ray.init(address="auto")
    group = placement_group([{"GPU": gpus, "CPU": 1}] * nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on_node(rank, function):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        options = {"num_gpus": gpus, "max_retries": 0, "scheduling_strategy": place}
        return ray.remote(function).options(**options)

    lost = 0
    while True:
        first = ray.get(on_node(0, address).remote())
        tasks = [on_node(rank, train).remote(rank, nodes, first) for rank in range(nodes)]
        codes = ray.get(tasks)
        lost += 76 in codes
        if not {75, 76} & set(codes) or lost > MOST_RESTARTS:
            return max(codes)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
