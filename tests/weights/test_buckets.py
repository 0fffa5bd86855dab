"""Weights from a bucket: a snapshot, one of its files, and several files with an index."""

import json

import numpy as np
import pytest

from axon_dist.core.errors import StoreError
from axon_dist.weights import find_tensors, hub_config

from . import hub


@pytest.fixture(params=["gs", "s3"])
def address(store, request):
    return f"{request.param}://bucket/models/llama"


def put(store, folder):
    for path in folder.rglob("*"):
        store.objects[f"bucket/models/llama/{path.name}"] = (
            len(store.objects) + 1,
            path.read_bytes(),
        )


@pytest.mark.parametrize("files", [1, 2])
def test_a_snapshot_is_that_of_its_folder(store, address, tmp_path, files):
    tensors = hub.llama_tensors()
    hub.write(tmp_path, hub.LLAMA, tensors)
    if files == 2:
        (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
        places = {"weight_map": dict.fromkeys(tensors, "part.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(places))
    put(store, tmp_path)
    store.objects["bucket/models/llama/optimizer.bin"] = 99, b"what nobody asked for"
    store.faults = 0.1
    found = find_tensors(address)
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[name].open(), tensors[name]) for name in found)
    assert hub_config(address) == hub_config(tmp_path)
    assert not [one for one in store.requests if "optimizer.bin" in one and "?" not in one]
    name = "model.safetensors" if files == 1 else "model.safetensors.index.json"
    assert find_tensors(f"{address}/{name}").keys() == tensors.keys()


def test_nothing_there(address):
    with pytest.raises(StoreError, match=r"no such objects at .*://bucket/models/llama"):
        find_tensors(address)
