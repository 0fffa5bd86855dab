"""Several processes save together; what they wrote restores onto any number of devices."""

import importlib.util
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from axon_dist.checkpoint import load_checkpoint, open_tensors, read_manifest

WORKER = pathlib.Path(__file__).with_name("checkpoint_worker.py")
NUM_PROCESSES = 2

pytestmark = pytest.mark.multiprocess


def worker_module():
    spec = importlib.util.spec_from_file_location("checkpoint_worker", WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return str(listener.getsockname()[1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory, object_server):
    folder, port = tmp_path_factory.mktemp("saved"), free_port()
    flags = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "16", "XLA_FLAGS": flags}
    environment |= object_server.env()
    environment["BUCKET"] = "gs://bucket/saved"
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, str(rank), str(NUM_PROCESSES), port, folder],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(NUM_PROCESSES)
    ]  # fmt: skip
    try:
        for rank, process in enumerate(processes):
            out, _ = process.communicate(timeout=240)
            assert process.returncode == 0, out
            assert f"process {rank} done" in out
    finally:
        for process in processes:
            process.kill()
    pieces = object_server.names("bucket/saved/step_00000003/zarr/rows/")
    assert len(pieces) == 1 + 8, "every device of every process wrote its shard"
    assert not object_server.names("bucket/saved/step_00000003/zarr/.")
    return folder


@pytest.mark.parametrize("axes", ["fsdp=1", "fsdp=2", "fsdp=8"])
@pytest.mark.parametrize("path", ["full/step_00000003", "sharded/step_00000002"])
def test_several_processes_to_one(saved, make_world, axes, path):
    worker = worker_module()
    worker.check(load_checkpoint(saved / path, worker.make_state(make_world(axes))))
    assert read_manifest(saved / path).mesh == {"fsdp": 8}


def test_process_0_exports_what_all_hold(saved):
    worker, tensors = worker_module(), open_tensors(saved / "state.safetensors")
    for name, values in worker.VALUES.items():
        np.testing.assert_array_equal(tensors[name], values)
