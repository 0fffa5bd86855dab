"""Expert parallelism: what stays where it lies, what travels, what is left out, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import Reduction, Strategy, World, build_train_step, compose, ddp
from axon_dist.core.errors import (
    ConfigError,
    DivisibilityError,
    StrategyConflictError,
    UnsupportedError,
)
from axon_dist.inspect import collectives
from axon_dist.models import ExpertConfig, Transformer, TransformerConfig, next_token_loss
from axon_dist.parallel import expert_parallel, fsdp, local_sgd, pipelined, suggest_plan
from axon_dist.wrappers import StageChain
from tests.contracts.models import Case
from tests.contracts.reference import METRICS, assert_close, assert_metrics, train

EXPERTS, WIDTH, HIDDEN = 4, 16, 24


class Somebodys(nnx.Module):
    """Experts as others write them: a one-hot dispatch into stacked matrices, in einsums."""

    def __init__(self, rngs):
        init = lambda *shape: nnx.Param(jax.random.normal(rngs.params(), shape) * 0.3)
        self.inner = nnx.Linear(8, WIDTH, rngs=rngs)
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.w_in, self.b_in = init(EXPERTS, WIDTH, HIDDEN), init(EXPERTS, HIDDEN)
        self.w_out = init(EXPERTS, HIDDEN, WIDTH)
        self.outer = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        x = jnp.tanh(self.inner(x))
        scores = jax.nn.softmax(self.router(x))
        best = jax.nn.one_hot(jnp.argmax(scores, -1), EXPERTS) * scores
        each = jnp.einsum("be,bd->ebd", best, x)
        hidden = jax.nn.gelu(jnp.einsum("ebd,edh->ebh", each, self.w_in[...]) + self.b_in[:, None])
        made = jnp.einsum("ebh,ehd->ebd", hidden, self.w_out[...])
        return self.outer(x + jnp.sum(made, 0))


class Blocks(nnx.Module):
    """Every head has a matrix, and nothing chooses among them."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.blocks = nnx.Param(jnp.ones((2, 8, 8)))

    def __call__(self, x):
        x = self.inner(x).reshape(-1, 2, 8)
        return jnp.einsum("bhi,hij->bhj", x, self.blocks[...]).reshape(-1, 16)


def features(step):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(16, 8)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, :4])}


def square(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def tokens(step=0):
    return {"tokens": np.random.default_rng(step).integers(0, 32, (8, 9)).astype(np.int32)}


def decoder(num_layers=1, **experts):
    sizes = {"vocab_size": 32, "width": 16, "ffn_width": 16, "num_layers": num_layers}
    config = TransformerConfig.preset("tiny", **sizes, experts=ExpertConfig(**experts))
    return lambda: Transformer(config, rngs=nnx.Rngs(0))


def built(strategy, mesh="dp=2,ep=2", make=None, loss=next_token_loss, **options):
    world = World.emulate(4, mesh)
    return build_train_step(make or decoder(), optax.sgd(0.1), loss, strategy, world, **options)


def test_experts_of_other_models_are_found_with_their_biases():
    found = dict(suggest_plan(lambda: Somebodys(nnx.Rngs(0))).experts)
    assert found == {"^b_in$": -2, "^w_in$": -3, "^w_out$": -3}
    assert suggest_plan(lambda: Blocks(nnx.Rngs(0))).experts == ()


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "accumulate", "data"),
    [
        ("fsdp=2,ep=2", 2, lambda: fsdp(min_elements=8)),
        pytest.param("dp=2,ep=2", 1, lambda: ddp(), marks=pytest.mark.full),
    ],
)
def test_experts_of_other_models_equal_one_device_and_are_not_gathered(mesh, accumulate, data):
    case = Case(lambda: Somebodys(nnx.Rngs(0)), square, features)
    want = train(case, optax.sgd(0.1), 2, accumulate)
    split = expert_parallel(experts=suggest_plan(case.make).experts)
    strategy, options = compose(data(), split), {"accumulate": accumulate, "metrics": METRICS}
    step = built(strategy, mesh, case.make, square, **options)
    state = step.init()
    assert state.params["w_in"].sharding.spec[0] == "ep"
    program = step.lower(features(0)).compile()
    ledger = collectives(program, step.world.mesh)
    experts = 4 * (2 * EXPERTS * WIDTH * HIDDEN) // 2
    assert ledger.total_wire_bytes("all-gather", "ep") < experts
    for number in range(2):
        state, metrics = step(state, features(number))
        assert_metrics(metrics, want.metrics[number], f"step {number}")
    assert_close(state.params, want.params, 1e-5, "parameter")


@pytest.mark.full
@pytest.mark.sample("ring")
@pytest.mark.parametrize("form", ["ring", "all_to_all"])
def test_tokens_without_a_place_are_counted(form):
    step = built(compose(ddp(), expert_parallel(form, capacity=0.5)), make=decoder(count=4))
    _, metrics = step(step.init(), tokens())
    # As many slots as half of the assignments: at least half of these find none.
    assert 0.5 <= float(metrics["dropped"]) < 1


@pytest.mark.full
@pytest.mark.sample("1.25")
@pytest.mark.parametrize("capacity", [None, 1.25])
def test_the_form_that_moves_fewer_bytes_is_chosen(capacity):
    """Slots for 4 experts of 1.25/4 of the tokens are fewer than the tokens of two ranks."""
    strategy = expert_parallel(capacity=capacity)
    step = built(compose(ddp(), strategy), make=decoder(count=4, per_token=1))
    ledger = collectives(step.lower(tokens()).compile(), step.world.mesh)
    sent = ledger.total_wire_bytes("all-to-all", "ep")
    assert (sent > 0) == (capacity is not None)


REFUSED = {
    "somebody's experts in stages": (
        lambda: built(
            compose(pipelined(2, 2, classes="Somebodys"), expert_parallel(experts=[("w_", -3)])),
            "pp=2,ep=2",
            lambda: StageChain([Somebodys(nnx.Rngs(i)) for i in range(2)]),
            square,
        ),
        UnsupportedError,
        "'stages/0/w_in' in a module without the methods mix_experts and feed.*along 'ep'.*ddp or",
    ),
    "experts outside of the stages": (
        lambda: built(
            compose(pipelined(2, 2, classes="SelfAttention"), expert_parallel()),
            "pp=2,ep=2",
            decoder(2),
        ),
        UnsupportedError,
        "'blocks/0/mlp/down' outside its blocks.*leave the pipeline out",
    ),
    "slow links": (
        lambda: built(compose(local_sgd("dp", every=2), expert_parallel())),
        StrategyConflictError,
        "replicas over axis 'dp'.*over axis 'ep'.*leave expert_parallel out",
    ),
    "once per step": (
        lambda: built(
            compose(ddp(), expert_parallel(), Strategy("s", reduction=Reduction(per="step"))),
            accumulate=2,
        ),
        UnsupportedError,
        "split along 'ep'.*which a reduction per 'step' of 2 microbatches needs",
    ),
    "buckets": (
        lambda: built(compose(ddp(bucket_capacity=100), expert_parallel())),
        (UnsupportedError, StrategyConflictError),
        "bucket_capacity=100",
    ),
    "dtype of the reduction": (
        lambda: built(compose(ddp(), expert_parallel()), precision=True),
        UnsupportedError,
        "a reduction in float32 with compute in bfloat16 needs",
    ),
    "no experts": (
        lambda: built(expert_parallel(), "ep=4", lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0))),
        UnsupportedError,
        "found no stacked experts.*parameters are bias, kernel.*suggest_plan",
    ),
    "capacity of the compiler": (
        lambda: built(
            expert_parallel(capacity=2.0, experts=[("w_", -3)]),
            "ep=4",
            lambda: Somebodys(nnx.Rngs(0)),
            square,
        ),
        UnsupportedError,
        "capacity=2.0 are for modules with the methods mix_experts and feed.*Leave both out",
    ),
    "indivisible": (
        lambda: built(expert_parallel(), "ep=4", decoder(count=6)),
        DivisibilityError,
        r"mlp/down: dim 0 of \(6, 16, 16\) is split over ep=4.*among \[1, 2, 3, 6\]",
    ),
    "form": (lambda: expert_parallel("rong"), ConfigError, "ExpertForm got 'rong'.*'ring'"),
    "capacity": (lambda: expert_parallel(capacity=0.0), ConfigError, "must be above 0"),
    "dim": (lambda: expert_parallel(experts=[("w", 0)]), ConfigError, "count it from the end"),
    "pattern": (lambda: expert_parallel(experts=[("(", -3)]), ConfigError, "regular expression"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    build, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        build()
