import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from axon_dist.checkpoint.seal import file_checksum, leaf_checksum, leaf_checksums

DTYPES = ["float32", "bfloat16", "float16", "int8", "uint8", "int32", "bool", "complex64",
          "float8_e4m3fn", "float4_e2m1fn", "int4"]  # fmt: skip


def reference(words):
    """The formula, on Python integers."""
    return sum((u ^ (i * 0x9E3779B1 % 2**32)) * (2 * i + 1) for i, u in enumerate(words)) % 2**32


def test_the_formula():
    values = np.arange(-20, 22, dtype=np.int32).reshape(2, 3, 7)
    expected = reference(values.view(np.uint32).ravel().tolist())
    assert int(leaf_checksum(jnp.asarray(values))) == expected


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 29), st.integers(0, 31))
def test_every_flipped_bit_changes_it(position, bit):
    values = np.arange(30, dtype=np.uint32) * 977
    flipped = values.copy()
    flipped[position] ^= np.uint32(1 << bit)
    assert reference(values.tolist()) != reference(flipped.tolist())
    assert int(leaf_checksum(jnp.asarray(flipped))) == reference(flipped.tolist())


@pytest.mark.sample("float32", "bfloat16", "bool", "complex64", "float4_e2m1fn", "int4")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_however_it_is_split(dtype, make_world):
    values = (np.arange(64) % 5).reshape(8, 8).astype(jnp.dtype(dtype))
    checksum = jax.jit(leaf_checksum)
    whole = int(checksum(values))
    mesh = make_world("dp=4,tp=2").mesh
    for spec in (("dp",), (None, "tp"), ("tp", "dp"), (("dp", "tp"),), ()):
        split = jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))
        assert int(leaf_checksums({"x": split})["x"]) == whole
    if dtype != "bool":
        values[3, 3] = 1 if values[3, 3] != 1 else 0
        assert int(checksum(values)) != whole


def test_a_split_array_is_not_gathered(world):
    split = NamedSharding(world.mesh, PartitionSpec(None, "dp"))
    x = jax.ShapeDtypeStruct((8, 1024), jnp.float32, sharding=split)
    compiled = jax.jit(leaf_checksum).lower(x).compile()
    assert "all-gather" not in compiled.as_text()


def test_leaves_on_different_devices(make_world):
    one = jax.device_put(jnp.ones(4), NamedSharding(make_world("dp=2").mesh, PartitionSpec("dp")))
    sums = leaf_checksums({"a": one, "b": jnp.ones(4), "c": jnp.zeros(4)})
    assert list(sums) == ["a", "b", "c"]
    assert int(sums["a"]) == int(sums["b"]) != int(sums["c"])


def test_file_checksum(tmp_path):
    contents = bytes(range(256)) * 5000
    (tmp_path / "f").write_bytes(contents)
    assert file_checksum(tmp_path / "f") == zlib.crc32(contents)
