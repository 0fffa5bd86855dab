"""Bytes of a small model under a strategy on eight emulated devices: `python docs/bytes.py ddp`."""

import sys

from axon_dist.core.words import byte_size
from axon_dist.train.app.examine import program_record
from axon_dist.train.app.runs import build_run
from axon_dist.train.config import RunConfig

MESHES = {"tensor": "dp=4,tp=2", "context": "dp=4,cp=2", "pipeline": "pp=4,dp=2"}
PARALLEL = {
    "tensor": {"ddp": {}, "tensor": {"sequence": True}},
    "context": {"ddp": {}, "context": {}},
    "pipeline": {"ddp": {}, "pipeline": {"num_microbatches": 8}},
    "hybrid": {"hybrid": {}},
}


def lines(name):
    """A line for each kind of memory, and for each axis what is sent over it."""
    mesh = MESHES.get(name, "dp=2,fsdp=4" if name == "hybrid" else "dp=8")
    config = RunConfig.from_dict(
        {
            "devices": {"emulate": 8},
            "mesh": mesh,
            "parallel": PARALLEL.get(name, {name: {}}),
            "model": {
                "width": 32,
                "num_layers": 4,
                "num_heads": 4,
                "ffn_width": 64,
                "scan_layers": True,
            },
            "data": {"max_bytes": 200_000, "sequence_length": 32},
            "train": {"global_batch": 16},
        }
    )
    found = program_record(build_run(config))
    state = {label: size for label, size in found["memory"].items() if "state" in label}
    yield f"{name} on {mesh}, bytes per device and step"
    for label, size in {"parameters": found["memory"]["parameters"], **state}.items():
        if label != "outputs other than the state":
            yield f"  {label:<16} {byte_size(size):>8}"
    for axis, size in found["wire_bytes_by_axis"].items():
        yield f"  {'sent over ' + axis:<16} {byte_size(size):>8}"


if __name__ == "__main__":
    print("\n".join(lines(sys.argv[1])))
