"""Tensor parallelism of unmodified models: what it stores, what it sends, what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import ActivationCheckpointing, Strategy, World, build_train_step, compose, ddp
from axon_dist.core.errors import (
    ConfigError,
    DivisibilityError,
    MeshError,
    StrategyConflictError,
    UnsupportedError,
)
from axon_dist.inspect import collectives, device_bytes
from axon_dist.mesh import MeshSpec
from axon_dist.models import MLP, Transformer, TransformerConfig, next_token_loss
from axon_dist.parallel import (
    STRATEGIES,
    Plan,
    context_parallel,
    fsdp,
    pipelined,
    suggest_plan,
    tensor_parallel,
)
from tests.drawn import drawn

from .foreign import GPT, Decoder

CONFIG = TransformerConfig(vocab_size=64, width=32, num_layers=2, num_heads=8, ffn_width=64)
TOKENS = np.random.default_rng(0).integers(0, 32, size=(4, 17)).astype(np.int32)


def make(**changes):
    return Transformer(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0, dropout=1))


def build(model, strategy, world, loss_fn=next_token_loss):
    return build_train_step(model, optax.adam(1e-3), loss_fn, strategy, world)


def gradients(model, strategy, world):
    step = build(model, strategy, world)
    return jax.tree.leaves(step.gradients(step.init(), {"tokens": TOKENS})[0])


def same(ours, theirs):
    for got, want in zip(ours, theirs, strict=True):
        scale = max(np.abs(want).max(), 1e-3)
        np.testing.assert_allclose(got / scale, want / scale, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        (lambda: GPT("slices", nnx.Rngs(0)), "tp=4"),
        (lambda: GPT("reshape", nnx.Rngs(0)), "tp=2"),
        (lambda: GPT("per_head", nnx.Rngs(0)), "dp=2,tp=4"),
        (lambda: Decoder(nnx.Rngs(0)), "tp=4"),
        (lambda: make(tied_head=True, dropout=0.1), "tp=8"),
    ],
    ids=["slices", "reshape", "per_head", "bare", "tied"],
)
def test_models_by_others_equal_one_device(model, mesh):
    world = World.emulate(8 if "8" in mesh or "dp" in mesh else int(mesh[-1]), mesh)
    strategy = tensor_parallel(suggest_plan(model), sequence=True)
    strategy = compose(ddp(), strategy) if "dp" in mesh else strategy
    same(gradients(model(), strategy, world), gradients(model(), ddp(), World.emulate(1, "dp=1")))


def test_every_split_leaf_is_one_share(make_world):
    world = make_world("tp=8")
    model = drawn(lambda: make(num_layers=1))
    step = build(model, tensor_parallel("transformer"), world)
    state = step.init()
    grads, _ = step.gradients(state, {"tokens": TOKENS})
    for tree in (state.params, grads, state.opt_state):
        whole = sum(x.nbytes for x in jax.tree.leaves(tree) if x.ndim > 1)
        mine = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree) if x.ndim > 1)
        assert mine == whole // 8
    norms = sum(x.nbytes for x in jax.tree.leaves(state.params) if x.ndim == 1)
    total = sum(x.nbytes for x in jax.tree.leaves(state.params))
    assert set(device_bytes(state.params).values()) == {(total - norms) // 8 + norms}


@pytest.mark.full
def test_a_block_sums_twice_forward_and_twice_backward(make_world):
    """The difference that one more layer makes."""
    world = make_world("tp=4")
    batch = {"tokens": jax.ShapeDtypeStruct((4, 17), jnp.int32)}
    found = []
    for num_layers in (1, 2):
        step = build(make(num_layers=num_layers), tensor_parallel("transformer"), world)
        found.append(collectives(step.lower(batch).compile(), world.mesh))
    kinds = [{row.kind for row in ledger} for ledger in found]
    assert kinds == [{"all-reduce"}, {"all-reduce"}]
    assert found[1].num_executions() - found[0].num_executions() == 4


@pytest.mark.full
def test_the_loss_moves_no_vocabulary(make_world):
    """Twenty times the vocabulary, the same bytes."""
    world = make_world("tp=4")
    batch = {"tokens": jax.ShapeDtypeStruct((4, 17), jnp.int32)}
    sent = []
    for vocab_size in (64, 1280):
        step = build(
            make(vocab_size=vocab_size, num_layers=1), tensor_parallel("transformer"), world
        )
        compiled = jax.jit(step.gradients).lower(step.abstract_state, batch).compile()
        sent.append(collectives(compiled, world.mesh).total_wire_bytes())
    assert sent[0] == sent[1]


def test_too_few_key_heads_stay_whole():
    policy = tensor_parallel(suggest_plan(lambda: make(num_kv_heads=2))).params
    decide = lambda size, name: policy(
        f"blocks/0/attention/{name}/kernel", (32, 8 if name == "k" else 32), MeshSpec(tp=size)
    )
    assert "tp" in decide(4, "q")
    assert "tp" not in decide(4, "k")
    assert "tp" in decide(2, "k")


def test_the_registry_reads_the_plan_off_the_model(make_world):
    world = make_world("tp=2")
    auto = STRATEGIES["tensor"](lambda: make(), world)
    preset = STRATEGIES["tensor"](None, world, plan="transformer", sequence=True)
    given = STRATEGIES["tensor"](None, world, plan={"up$": "column", "down$": "row"})
    kernel = ("blocks/0/mlp/down/kernel", (64, 32), world.mesh)
    assert auto.params(*kernel) == preset.params(*kernel) == given.params(*kernel)
    assert preset.layers[0].sequence


def test_heads_that_do_not_divide_raise_before_compilation(make_world):
    four_heads = lambda: make(num_heads=4, num_layers=1)
    plan = suggest_plan(four_heads)
    with pytest.raises(
        DivisibilityError,
        match=r"attention/\w+/kernel .*: 4 heads of 8 features .* over tp=8; .*\[1, 2, 4\]",
    ):
        build(four_heads, tensor_parallel(plan), make_world("tp=8"))


def test_two_strategies_on_one_dim_name_both(make_world):
    world = make_world("fsdp=2,tp=2")
    rows = tensor_parallel({"up$": "row"})
    columns = dataclasses.replace(tensor_parallel({"up$": "row"}, axis="fsdp"), name="other")
    with pytest.raises(StrategyConflictError, match=r"up/kernel: dim 0 of \(32, 64\) .*'tensor'"):
        build(make, compose(rows, columns), world)
    step = build(make, compose(fsdp(min_elements=8), rows), world)
    up = step.state_shardings.params["blocks"][0]["mlp"]["up"]["kernel"].spec
    assert tuple(up) == ("tp", "fsdp")


def test_errors_name_what_there_is(make_world):
    world = make_world("tp=2")
    square = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    with pytest.raises(UnsupportedError, match=r"matches no layer .* layers/0.*suggest_plan"):
        build(MLP((16, 24, 4), rngs=nnx.Rngs(0)), tensor_parallel("attention"), world, square)
    with pytest.raises(ConfigError, match=r"no plan is called 'transfomer'. Did you mean 'transf"):
        tensor_parallel("transfomer")
    with pytest.raises(ConfigError, match=r"'up': unknown mode 'colum'. Did you mean 'column'"):
        Plan.of({"up": "colum"})
    with pytest.raises(MeshError, match=r"over axis 'tp', which mesh dp=8 lacks"):
        build(make, tensor_parallel("transformer"), World.emulate(8, "dp=8"))
    sums = Strategy("remat", remat=ActivationCheckpointing(policy="sums"))
    with pytest.raises(
        ConfigError, match=r"'sums' keeps .* 'ddp \+ remat' has none.*tensor_parallel"
    ):
        build(make, compose(ddp(("tp",)), sums), world)
    short = {"tokens": np.zeros((2, 4), np.int32)}
    step = build(drawn(make), tensor_parallel("transformer", sequence=True), world)
    with pytest.raises(DivisibilityError, match=r"3 positions .* tp=2; .* multiple of 2"):
        step.gradients(step.init(), short)


def test_rings_are_refused_where_nothing_can_go_round(make_world):
    with pytest.raises(ConfigError, match=r"rings=True and sequence=False; .* set sequence=True"):
        tensor_parallel("transformer", rings=True)
    rings = tensor_parallel("transformer", sequence=True, rings=True)
    with pytest.raises(StrategyConflictError, match=r"ranks of 'tp', but 'cp' splits them .* cont"):
        build(make, compose(rings, context_parallel()), make_world("cp=2,tp=2"))
    with pytest.raises(StrategyConflictError, match=r"activations around .* 'tp'.*leave rings out"):
        build(make, compose(rings, pipelined(2, 2)), make_world("pp=2,tp=2"))
    mlp, square = MLP((16, 24, 16), rngs=nnx.Rngs(0)), lambda model, x: jnp.mean(model(x) ** 2)
    rings = tensor_parallel(suggest_plan(mlp), sequence=True, rings=True)
    with pytest.raises(UnsupportedError, match=r"of the plan got f.*32\[4,16\]\. Set rings"):
        build(mlp, rings, make_world("tp=2"), square).lower(np.ones((4, 16), np.float32))


def test_layers_with_one_input_send_it_round_once(make_world):
    """A block has seven products and four rings: before q, k, v; out; before gate, up; down."""
    world, model = make_world("tp=4"), lambda: make(num_layers=1)
    rings = tensor_parallel(suggest_plan(model), sequence=True, rings=True)
    step = build(model, rings, world)
    text = step.lower({"tokens": np.zeros((4, 17), np.int32)}).as_text()
    # Of three sends each, and backward each is a ring of its kind.
    assert text.count("collective_permute") == 2 * 4 * 3


class Counting(nnx.Module):
    """Counts its calls in what it is given, and returns it and a scalar."""

    def __init__(self):
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x, calls):
        calls.set_value(calls[...] + 1)
        return self.linear(x), calls, jnp.mean(x)


class Counted(nnx.Module):
    """Two layers, which pass a counter on."""

    def __init__(self):
        self.one, self.other = Counting(), Counting()
        self.head = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        x, calls, _ = self.one(x, self.calls)
        return self.head(self.other(x, calls)[0])


def test_a_replicated_layer_returns_its_callers_own_object_and_a_scalar():
    plan = {"^(one|other)$": "replicate", "^head$": "column"}
    loss = lambda model, batch: jnp.mean(jnp.mean(model(batch["x"]) ** 2, -1))
    step = build(Counted(), tensor_parallel(plan), World.emulate(2, "tp=2"), loss)
    state, _ = step(step.init(), {"x": np.ones((4, 8), np.float32)})
    assert float(state.buffers["calls"]) == 2
