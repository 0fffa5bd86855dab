import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.checkpoint import export_safetensors, open_tensors
from axon_dist.checkpoint.stores import plan_order, write_tensors
from axon_dist.core.errors import CheckpointError, UnsupportedError


def test_the_library_reads_what_we_write(values, place, world, tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "state.safetensors"
    export_safetensors(path, place(values, world), metadata={"step": "3"})
    read = library.load_file(path)
    assert set(read) == {"float", "half", "int", "bool", "scalar", "empty", "key", "nested/0/nan"}
    for name in ("float", "half", "int", "bool", "scalar", "empty"):
        assert read[name].dtype == values[name].dtype
        np.testing.assert_array_equal(read[name], values[name])
    np.testing.assert_array_equal(read["key"], jax.random.key_data(values["key"]))
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"step": "3"}
    assert [file.name for file in tmp_path.iterdir()] == ["state.safetensors"]


def test_we_read_what_the_library_writes(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    arrays = {"a": np.arange(3, dtype=np.int8), "b": np.eye(3), "c": np.array(2.0)}
    library.save_file(arrays, tmp_path / "x.safetensors")
    read = open_tensors(tmp_path / "x.safetensors")
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array)


def test_wide_elements_come_first_and_one_array_is_made_at_a_time(tmp_path):
    leaves = {"i": np.zeros(3, np.int8), "d": np.ones(2), "b": np.zeros(1, jnp.bfloat16)}
    order = plan_order(leaves)
    assert order == ["d", "b", "i"]
    made = []

    def make():
        for name in order:
            made.append(name)
            yield leaves[name]

    write_tensors(tmp_path / "f", {name: leaves[name] for name in order}, make())
    assert made == order
    np.testing.assert_array_equal(open_tensors(tmp_path / "f")["d"], np.ones(2))


def test_values_that_the_format_cannot_hold_raise():
    with pytest.raises(UnsupportedError, match=r"w is complex64, .* names are BOOL, .*Convert it"):
        plan_order({"w": jnp.ones(2, jnp.complex64)})


@pytest.mark.parametrize("contents", [b"", b"abc", struct.pack("<Q", 10**6) + b"{}", b"\xff" * 64])
def test_files_of_another_kind_raise(tmp_path, contents):
    (tmp_path / "f").write_bytes(contents)
    with pytest.raises(CheckpointError, match=r"cannot read '.*f' as safetensors: .*name another"):
        open_tensors(tmp_path / "f")


def test_a_failed_replacement_leaves_nothing_behind(tmp_path):
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "kept").touch()
    with pytest.raises(CheckpointError, match="cannot write"):
        export_safetensors(tmp_path / "w", {"w": jnp.ones(2)})
    assert [path.name for path in tmp_path.iterdir()] == ["w"]
