import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers as Dims

from axon_dist import DDP, World, build_train_step, hidden_matrices, muon
from axon_dist.core.errors import ConfigError, UnsupportedError
from axon_dist.models import Transformer, TransformerConfig

SHAPES = {"broad": (4, 6), "tall": (6, 4), "bias": (4,), "stacked": (2, 4, 6), "heads": (4, 2, 3)}
PARAMS = {
    name: jnp.asarray(np.random.default_rng(n).normal(size=shape).astype(np.float32))
    for n, (name, shape) in enumerate(sorted(SHAPES.items()))
}


def named(**dims):
    return lambda params: {name: dims.get(name) for name in params}


ARGUMENTS = {
    "as it is": {},
    "decayed": {"nesterov": False, "weight_decay": 0.1, "consistent_rms": 0.2, "beta": 0.9},
    "aol": {"preconditioning": "aol", "ns_coeffs": "dion", "mu_dtype": "bfloat16"},
    "schatten": {"preconditioning": "schatten", "adaptive": True, "ns_steps": 3},
    "spectral": {"preconditioning": "spectral", "adam_learning_rate": 0.1, "adam_b2": 0.9},
    "by function": {
        "muon_weight_dimension_numbers": named(
            broad=Dims(), tall=Dims(1, 0), stacked=Dims(-2, -1), heads=Dims((0,), (1, 2))
        ),
        "weight_decay": 0.1,
        "weight_decay_mask": lambda params: jax.tree.map(lambda x: x.ndim == 2, params),
    },
    "by tree": {
        "muon_weight_dimension_numbers": {
            **dict.fromkeys(SHAPES), "stacked": Dims((0, 2), 1), "heads": Dims(2, 0),
        }
    },
}  # fmt: skip
TRIED = ("decayed", "by function")


@pytest.mark.full
@pytest.mark.sample("by function")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in TRIED else pytest.mark.full) for n in ARGUMENTS]
)
def test_equals_optax_and_has_its_state(name):
    ours, theirs = muon(0.02, **ARGUMENTS[name]), optax.contrib.muon(0.02, **ARGUMENTS[name])
    mine, want = ours.init(PARAMS), theirs.init(PARAMS)
    for step in range(2):
        grads = jax.tree.map(lambda x, step=step: jnp.sin(x * (step + 1)), PARAMS)
        # Each continues from the state of the other.
        got, mine_next = jax.jit(ours.update)(grads, want, PARAMS)
        expected, want_next = jax.jit(theirs.update)(grads, mine, PARAMS)
        assert jax.tree.structure((got, mine_next)) == jax.tree.structure((expected, want_next))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)
        for a, b in zip(jax.tree.leaves(mine_next), jax.tree.leaves(want_next), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=1e-5, atol=1e-7)
        mine, want = mine_next, want_next


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"ns_coeffs": "dino"}, "unknown ns_coeffs 'dino'. Did you mean 'dion'?"),
        ({"ns_coeffs": (1.0, 2.0)}, r"ns_coeffs has the shape \(2,\); it must be \(3,\)"),
        ({"ns_coeffs": "dion", "ns_steps": 4}, "at most ns_steps=4"),
        ({"preconditioning": "frobenus"}, "unknown preconditioning 'frobenus'. Did you mean"),
    ],
)
def test_unsupported_settings_are_refused(arguments, text):
    with pytest.raises(ConfigError, match=text):
        muon(0.02, **arguments)


def test_rows_that_are_columns_too_are_refused():
    same = muon(0.02, muon_weight_dimension_numbers=named(broad=Dims(0, 0)))
    with pytest.raises(ConfigError, match="both a row and a column dim"):
        jax.eval_shape(same.update, PARAMS, same.init(PARAMS), PARAMS)


@pytest.mark.parametrize("scan", [False, True])
def test_hidden_matrices_are_those_of_blocks(scan):
    config = TransformerConfig.preset("tiny")
    make = lambda: Transformer(
        TransformerConfig(**{**vars(config), "scan_layers": scan}), rngs=nnx.Rngs(0)
    )
    params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(make), nnx.Param))
    found = hidden_matrices(make)(params)
    leaves = jax.tree_util.tree_leaves_with_path(found, is_leaf=lambda x: isinstance(x, Dims))
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    assert len(paths) == 7 * (1 if scan else config.num_layers)
    assert all("blocks" in path and "kernel" in path for path in paths)
    first = int(scan)
    assert {dims for _, dims in leaves} == {Dims((first,), (first + 1,))}


def test_heads_of_attention_are_columns():
    layer = lambda: nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    model = nnx.eval_shape(lambda: nnx.Sequential(layer()))
    found = hidden_matrices(model)(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    attention = found["layers"][0]
    assert attention["query"]["kernel"] == Dims((0,), (1, 2))
    assert attention["out"]["kernel"] == Dims((0, 1), (2,))


def test_a_model_without_blocks_has_no_hidden_matrices():
    with pytest.raises(ConfigError, match="no block of the model has a kernel of two dims"):
        hidden_matrices(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))


def test_matrices_in_a_branch_are_refused():
    world = World.emulate(8)
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    guarded = optax.apply_if_finite(muon(0.02), 3)
    loss = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    with pytest.raises(UnsupportedError, match="within 'cond', where they cannot be distributed"):
        build_train_step(model, guarded, loss, DDP(model, world.group("dp")), world)
