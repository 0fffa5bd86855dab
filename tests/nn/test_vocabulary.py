"""Vocabulary-parallel embedding and cross-entropy against the unsplit ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from axon_dist.core.errors import DivisibilityError
from axon_dist.inspect import collectives
from axon_dist.nn import VocabParallelEmbedding, vocab_parallel_cross_entropy

from .test_linear import per_rank

RNG = np.random.default_rng(0)
STATE = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def same_numbers_in_any_order():
    RNG.bit_generator.state = STATE


TOKENS = RNG.integers(0, 24, size=(4, 6)).astype(np.int32)


@pytest.mark.full
@pytest.mark.sample("8")
@pytest.mark.parametrize("size", [1, 2, 8])
def test_lookup_equals_indexing(make_world, size):
    group = make_world(f"tp={size}").group("tp")
    table = VocabParallelEmbedding(24, 8, group=group, rngs=nnx.Rngs(0))
    want = np.asarray(table.embedding[...])[TOKENS]
    np.testing.assert_array_equal(jax.jit(table)(TOKENS), want)
    for rank in np.split(np.asarray(per_rank(table, group, P("tp"))(TOKENS)), size):
        np.testing.assert_array_equal(rank, want)


def test_head_shares_the_table(make_world):
    group = make_world("tp=4").group("tp")
    table = VocabParallelEmbedding(24, 8, group=group, rngs=nnx.Rngs(0))
    x = RNG.normal(size=(2, 8)).astype(np.float32)
    logits = jax.jit(table.attend)(x)
    np.testing.assert_allclose(logits, x @ np.asarray(table.embedding[...]).T, atol=1e-5)
    assert logits.addressable_shards[0].data.shape == (2, 6)


@pytest.mark.sample("8")
@pytest.mark.parametrize("size", [2, 8])
def test_cross_entropy_and_gradient_equal_optax(make_world, size):
    group = make_world(f"tp={size}").group("tp")
    logits = 5 * RNG.normal(size=(4, 6, 24)).astype(np.float32)
    whole = lambda x: optax.softmax_cross_entropy_with_integer_labels(x, TOKENS).sum()
    split = lambda x: vocab_parallel_cross_entropy(x, TOKENS, group).sum()
    manual = jax.shard_map(
        lambda x: vocab_parallel_cross_entropy(x, TOKENS, group).sum(),
        mesh=group.mesh,
        in_specs=P(None, None, "tp"),
        out_specs=P(),
    )
    want, grad = jax.jit(jax.value_and_grad(whole))(logits)
    for loss in (split, manual):
        got, got_grad = jax.jit(jax.value_and_grad(loss))(logits)
        assert float(got) == pytest.approx(float(want), rel=1e-6)
        np.testing.assert_allclose(got_grad, grad, atol=1e-6)


def test_cross_entropy_moves_labels_not_logits(make_world):
    world = make_world("tp=4")
    vocabulary, positions = 4096, 8
    place = jax.sharding.NamedSharding(world.mesh, P(None, "tp"))
    logits = jax.ShapeDtypeStruct((positions, vocabulary), jnp.float32, sharding=place)
    labels = jax.ShapeDtypeStruct((positions,), jnp.int32)
    loss = lambda x, y: vocab_parallel_cross_entropy(x, y, world.group("tp")).sum()
    compiled = jax.jit(jax.grad(loss)).lower(logits, labels).compile()
    moved = collectives(compiled, world.mesh).total_wire_bytes()
    # Three float32 numbers per position, each all-reduced over four ranks.
    assert 0 < moved <= 3 * positions * 4 * 2 * 3 / 4
    assert compiled.memory_analysis().temp_size_in_bytes < positions * vocabulary * 4


def test_errors_name_sizes(make_world):
    world = make_world("fsdp=2,tp=4")
    group = world.group("tp")
    with pytest.raises(DivisibilityError, match=r"num_embeddings=10 .* tp=4"):
        VocabParallelEmbedding(10, 8, group=group, rngs=nnx.Rngs(0))
    with pytest.raises(DivisibilityError, match=r"classes=10 .* tp=4"):
        vocab_parallel_cross_entropy(jnp.zeros((2, 10)), jnp.zeros(2, int), group)


@pytest.mark.sample(
    "float32-bfloat16-None",
    "bfloat16-float32-None",
    "float32-float32-bfloat16",
    "bfloat16-bfloat16-float32",
)
@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("given", [jnp.float32, jnp.bfloat16])
def test_rows_and_logits_have_the_dtype_of_nnx_embed(dtype, param_dtype, given):
    dtypes = {"dtype": dtype, "param_dtype": param_dtype}
    mine = VocabParallelEmbedding(8, 4, **dtypes, rngs=nnx.Rngs(0))
    theirs = nnx.Embed(8, 4, **dtypes, rngs=nnx.Rngs(0))
    theirs.embedding.set_value(mine.embedding[...])
    x = jnp.linspace(-1, 1, 8).reshape(2, 4).astype(given)
    tokens = jnp.array([[0, 7], [3, 1]])
    for call in (lambda table: table.attend(x), lambda table: table(tokens)):
        assert call(mine).dtype == call(theirs).dtype
        np.testing.assert_array_equal(call(mine), call(theirs))
