"""Packed rows on GPUs: no array of all pairs of positions."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axon_dist.inspect import target_mesh
from axon_dist.mesh.targets import missing_compiler
from axon_dist.models import auto_attention

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(missing_compiler("h100:8") is not None, reason="needs the CUDA compiler"),
]


@pytest.mark.parametrize("length", [4096, 32_768])
def test_no_buffer_has_all_pairs_of_positions(length):
    place = NamedSharding(target_mesh("h100:8", "dp=8"), P("dp"))
    heads = jax.ShapeDtypeStruct((8, length, 4, 64), jnp.bfloat16, sharding=place)
    segments = jax.ShapeDtypeStruct((8, length), jnp.int32, sharding=place)

    def loss(query, key, value, segments):
        return jnp.sum(auto_attention(query, key, value, True, segments).astype(jnp.float32))

    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    text = step.lower(heads, heads, heads, segments).compile().as_text()
    assert "fmha" in text
    shapes = [found.split(",") for found in re.findall(r"\[([\d,]+)\]", text)]
    assert ["1", "1", "1024", "1024"] in shapes
    assert not [dims for dims in shapes if dims.count(str(length)) > 1]
