"""Every schedule, on every mesh it composes with, equals gradient accumulation on one device."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import Pipeline, World, build_train_step, compose, ddp, zero
from axon_dist.core.errors import (
    ConfigError,
    DivisibilityError,
    MeshError,
    ScheduleError,
    StrategyConflictError,
    UnsupportedError,
)
from axon_dist.core.weighted import Weighted
from axon_dist.inspect import collectives
from axon_dist.models import MLP, next_token_loss
from axon_dist.models.loss import cross_entropy
from axon_dist.parallel import context_parallel, pipelined, tensor_parallel
from axon_dist.schedule import (
    SCHEDULES,
    Costs,
    Schedule,
    build_schedule,
    one_f_one_b,
    search,
)
from axon_dist.step.storage import block_keys
from axon_dist.wrappers import PipelineStage, StageChain
from tests.drawn import drawn

from .models import (
    CASES,
    SAMPLES,
    Case,
    mean_square,
    mean_square_with_metrics,
    ragged_batch,
    regression_batch,
    token_batch,
    transformer,
    weighted_square,
)
from .reference import METRICS, assert_close, assert_same_training, train

NUM_STEPS = 5
TINY = {"width": 16, "ffn_width": 16, "vocab_size": 32, "max_length": 16}


class AuxBlock(nnx.Module):
    """A block that adds to a loss of its own, as routers do."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        y = jnp.tanh(self.inner(x))
        return x + y, jnp.mean(y**2)


class AuxNet(nnx.Module):
    """Blocks whose auxiliary losses skip the blocks behind them."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List(AuxBlock(rngs) for _ in range(4))
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        extra = []
        for block in self.blocks:
            x, loss = block(x)
            extra.append(loss)
        return self.head(x), sum(extra)


class PhaseBlock(nnx.Module):
    """A block that turns complex activations, and draws from a key that it hands on."""

    def __init__(self, rngs: nnx.Rngs):
        self.turn = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, z, key):
        key, own = jax.random.split(key)
        kept = jax.random.bernoulli(own, 0.8, z.shape)
        return (1 + 0.5j) * z + 1j * kept * jnp.tanh(self.turn(jnp.real(z))), key


class PhaseNet(nnx.Module):
    """Complex numbers and a random key from block to block.

    Args:
        scale: what the activations are multiplied by after each block but the first; another than
            1 makes the stages differ.
    """

    def __init__(self, rngs: nnx.Rngs, scale: float = 1.0):
        self.blocks = nnx.List(PhaseBlock(rngs) for _ in range(3))
        self.noise, self.scale = nnx.Rngs(noise=3).noise, scale

    def __call__(self, x):
        z, key = x + 0j, self.noise()
        for number, block in enumerate(self.blocks):
            z, key = block(z, key)
            z = z * self.scale if number and self.scale != 1 else z
        return jnp.real(z)[:, :4]


def auxiliary_loss(model, batch):
    """The main loss and the blocks' own."""
    y, extra = model(batch["x"])
    return jnp.mean((y - batch["y"]) ** 2) + 0.1 * extra, {"extra": extra}


def masked_tokens(step: int) -> dict:
    """Sequences of very uneven lengths, every fourth of them left out altogether."""
    rng = np.random.default_rng(300 + step)
    lengths = rng.integers(1, 9, size=SAMPLES) * (np.arange(SAMPLES) % 4 > 0)
    return token_batch(step) | {"mask": (np.arange(8) < lengths[:, None]).astype(np.float32)}


def masked_loss(model, batch):
    """A sum over the tokens that count, and the mean of their probabilities."""
    losses = cross_entropy(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])
    mask, weight = batch["mask"], jnp.sum(batch["mask"])
    sure = jnp.sum(jnp.exp(-losses) * mask) / weight
    return Weighted(jnp.sum(losses * mask), weight), {"sure": sure}


def mlp(*sizes: int, **options) -> Case:
    """Layers of different widths, activations between them."""
    make = lambda: drawn(lambda: MLP(sizes, rngs=nnx.Rngs(0, dropout=1), **options))
    return Case(make, mean_square_with_metrics, regression_batch)


def decoder(**changes) -> Case:
    """A decoder of equal blocks."""
    return Case(functools.partial(transformer, **TINY | changes), next_token_loss, token_batch)


MODELS = {
    "decoder4": decoder(num_layers=4),
    "decoder8": decoder(num_layers=8),
    "decoder16": decoder(num_layers=16),
    "uneven": decoder(num_layers=5),
    "dropout": decoder(num_layers=4, dropout=0.2),
    "masked": dataclasses.replace(decoder(num_layers=4), loss_fn=masked_loss, batch=masked_tokens),
    "untied": decoder(num_layers=2, tied_head=False),
    "tied": decoder(num_layers=2, tied_head=True),
    "mlp": mlp(16, 8, 24, 12, 4),
    "mlp_dropout": mlp(16, 8, 24, 12, 4, dropout=0.2),
    "weighted": dataclasses.replace(mlp(16, 8, 8, 4), loss_fn=weighted_square, batch=ragged_batch),
    "auxiliary": Case(lambda: AuxNet(nnx.Rngs(0)), auxiliary_loss, regression_batch),
    "phases": Case(lambda: PhaseNet(nnx.Rngs(0)), mean_square, regression_batch),
    "phases_apart": Case(lambda: PhaseNet(nnx.Rngs(0), 0.8), mean_square, regression_batch),
    "chunked": decoder(num_layers=4, tied_head=False, logits="chunked"),
    "chunked_uneven": decoder(num_layers=5, tied_head=False, logits="chunked", dropout=0.2),
    "modules": Case(
        lambda: StageChain(
            [nnx.Linear(16, 7, rngs=nnx.Rngs(0)), MLP((7, 10, 4), rngs=nnx.Rngs(1))]
        ),
        mean_square,
        regression_batch,
    ),
}
TENSOR = {
    "attention/(q|k|v)$": "column",
    "attention/out$": "row",
    "(gate|up)$": "column",
    "down$": "row",
}
WITH = {
    "": (),
    "ddp": (ddp(),),
    "zero1": (zero(1, min_elements=8),),
    "zero3": (zero(3, min_elements=8),),
    "tensor": (tensor_parallel(TENSOR),),
    "ddp+tensor": (ddp(), tensor_parallel(TENSOR)),
    "sequence": (tensor_parallel(TENSOR, sequence=True),),
    "ddp+sequence": (ddp(), tensor_parallel(TENSOR, sequence=True)),
    "zero1+sequence": (zero(1, min_elements=8), tensor_parallel(TENSOR, sequence=True)),
    "zero3+sequence": (zero(3, min_elements=8), tensor_parallel(TENSOR, sequence=True)),
    "ulysses": (context_parallel("ulysses"),),
    "ddp+ulysses": (ddp(), context_parallel("ulysses")),
    "ddp+layers": (ddp(), tensor_parallel({"layers/0$": "column", "layers/1$": "row"})),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    schedule: str
    mesh: str
    microbatches: int
    model: str
    other: str = ""
    chunks: int | None = None
    backward: str = "recompute"
    split_vocabulary: bool = False

    def __str__(self) -> str:
        chunks = f"-v{self.chunks}" if self.chunks else ""
        where = f"{self.schedule}{chunks}-{self.mesh}-m{self.microbatches}"
        vocabulary = "-vocabulary" if self.split_vocabulary else ""
        return f"{where}-{self.model}-{self.other}-{self.backward}{vocabulary}"


def takes_any_count(name: str) -> bool:
    """Whether it cuts a batch into numbers of microbatches that no number of devices divides."""
    try:
        return bool(build_schedule(name, 2, 3))
    except ScheduleError:
        return False


ROWS = [
    Row("zero_bubble_h1", "pp=2,dp=2", 4, "weighted", "ddp"),
    Row("interleaved_1f1b", "pp=2", 4, "mlp"),
    Row("1f1b", "pp=1", 4, "mlp"),
    Row("zero_bubble_v", "pp=2", 4, "mlp", backward="residuals"),
    Row("dual_pipe_v", "pp=2", 8, "mlp"),
]
"""Both backwards, chunks in a loop and in a V, halves of a backward and none, one stage and two."""
FULL = [
    Row("gpipe", "pp=2", 4, "mlp"),
    Row("eager_1f1b", "pp=2", 4, "mlp"),
    Row("interleaved_zero_bubble", "pp=2", 4, "mlp"),
    Row("v_half", "pp=2", 4, "mlp"),
    Row("v_min", "pp=2", 4, "mlp"),
    Row("eager_1f1b", "pp=2", 4, "tied"),
    Row("1f1b", "pp=2,dp=2", 4, "mlp_dropout", "ddp"),
    Row("1f1b", "pp=2,dp=2,tp=2", 2, "untied", "ddp+sequence"),
    Row("1f1b", "pp=2", 2, "phases"),
    Row("1f1b", "pp=2", 2, "uneven"),
    Row("zero_bubble_h1", "pp=4", 4, "chunked", split_vocabulary=True),
    Row("1f1b", "pp=2", 4, "dropout"),
    Row("interleaved_1f1b", "pp=2", 4, "decoder4"),
    Row("1f1b", "pp=2", 4, "weighted"),
    Row("eager_1f1b", "pp=2,dp=2", 4, "chunked", "zero1", split_vocabulary=True),
    *(Row(name, "pp=2", 4, "chunked", split_vocabulary=True) for name in SCHEDULES),
    *(
        Row("1f1b", "pp=2,dp=2", 4, "chunked", other, split_vocabulary=True)
        for other in ("ddp", "zero3")
    ),
    *(
        Row(name, "pp=2", 4, "chunked", backward="residuals", split_vocabulary=True)
        for name in ("gpipe", "zero_bubble_h1", "interleaved_1f1b")
    ),
    Row("1f1b", "pp=4", 8, "chunked_uneven", split_vocabulary=True),
    Row("gpipe", "pp=2", 4, "untied"),
    Row("1f1b", "pp=2,dp=2", 8, "masked", "zero1"),
    Row("1f1b", "pp=2,dp=2", 2, "decoder4", "zero3"),
    Row("zero_bubble_v", "pp=2", 4, "decoder4"),
    Row("zero_bubble_h1", "pp=4", 8, "mlp"),
    Row("1f1b", "pp=2", 4, "auxiliary"),
    Row("1f1b", "pp=2", 2, "phases_apart"),
    Row("1f1b", "pp=2", 4, "decoder4", backward="dots"),
    Row("1f1b", "pp=4", 8, "decoder4"),
    Row("1f1b", "pp=2,dp=2", 2, "decoder4", "zero1"),
    Row("1f1b", "pp=2", 4, "dropout", backward="residuals"),
    *(Row("zero_bubble_h1", "pp=3", 4, name) for name in ("phases", "phases_apart")),
    *(Row("1f1b", "pp=2", 4, name, backward="residuals") for name in ("phases", "phases_apart")),
    *(
        Row(name, f"pp={size}", count, "decoder8", chunks=None if size < 8 else 1)
        for name, row in SCHEDULES.items()
        for size in (2, 4, 8)
        for count in (size, 2 * size, 4 * size)
        if count <= 32 and size * row.chunks <= 8
    ),
    *(
        Row(name, "pp=8", count, "decoder16")
        for name, row in SCHEDULES.items()
        for count in (8, 32)
        if row.chunks == 2
    ),
    # Microbatches that no number of stages divides, and fewer than there are stages.
    *(
        Row(name, mesh, count, "decoder8")
        for name in SCHEDULES
        for mesh, count in (("pp=3", 4), ("pp=3", 8), ("pp=4", 2), ("pp=6", 16))
        if takes_any_count(name) and (mesh != "pp=6" or SCHEDULES[name].chunks == 1)
    ),
    *(Row("interleaved_1f1b", "pp=2", 8, "decoder8", chunks=v) for v in (2, 4)),
    Row("interleaved_zero_bubble", "pp=2", 8, "decoder8", chunks=4),
    *(
        Row(name, "pp=2", 4, "decoder4", backward="residuals")
        for name in ("interleaved_zero_bubble", "dual_pipe_v", "v_half", "v_min")
    ),
    Row("interleaved_1f1b", "pp=4", 8, "decoder16", chunks=4),
    *(Row(name, "pp=2,tp=2", 4, "decoder4", "sequence") for name in SCHEDULES),
    *(
        Row(name, "pp=2,dp=2,tp=2", 2, "decoder4", other)
        for name in ("1f1b", "zero_bubble_v")
        for other in ("ddp+tensor", "ddp+sequence", "zero1+sequence", "zero3+sequence")
    ),
    Row("1f1b", "pp=2,tp=2", 4, "dropout", "sequence", backward="residuals"),
    Row("1f1b", "pp=2,tp=2", 4, "uneven", "sequence"),
    *(Row(name, "pp=2,cp=2", 4, "decoder4", "ulysses") for name in ("1f1b", "zero_bubble_v")),
    Row("1f1b", "pp=2,dp=2,cp=2", 4, "dropout", "ddp+ulysses", backward="residuals"),
    Row("interleaved_1f1b", "pp=2,dp=2,tp=2", 4, "decoder4", "ddp+sequence", backward="dots"),
    *(
        Row(name, "pp=2,dp=2,tp=2", 4, "modules", "ddp+layers")
        for name in ("1f1b", "zero_bubble_h1")
    ),
    *(Row(name, "pp=2,dp=2", 4, "modules", "ddp") for name in ("1f1b", "zero_bubble_h1")),
    *(Row("1f1b", "pp=2,dp=2", 4, "modules", other) for other in ("zero1", "zero3")),
    *(Row(name, "pp=2,dp=2,tp=2", 4, "decoder4", "ddp+tensor") for name in SCHEDULES),
    *(Row(name, "pp=2,dp=4", 4, "dropout", "ddp") for name in SCHEDULES),
    *(Row(name, "pp=2,dp=2", 8, "masked", "ddp") for name in SCHEDULES),
    *(
        Row(name, "pp=2,dp=2", 8, "weighted", "ddp")
        for name, row in SCHEDULES.items()
        if row.chunks == 1
    ),
    *(Row(name, "pp=2", 4, "modules") for name, row in SCHEDULES.items() if row.chunks == 1),
]


@functools.cache
def expected(model: str, microbatches: int):
    """The one-device run, shared by every row that it is the oracle of."""
    return train(MODELS[model], optax.sgd(0.05, momentum=0.9), NUM_STEPS, microbatches)


def check(row: Row, has_gradients: bool = True) -> None:
    """Runs one row and compares everything with one device."""
    case, want = MODELS[row.model], expected(row.model, row.microbatches)
    sizes = dict(part.split("=") for part in row.mesh.split(","))
    world = World.emulate(math.prod(map(int, sizes.values())), row.mesh)
    pipe = pipelined(
        int(sizes["pp"]),
        row.microbatches,
        row.schedule,
        chunks=row.chunks,
        backward=row.backward,
        split_vocabulary=row.split_vocabulary,
    )
    strategy = compose(pipe, *WITH[row.other])
    optimizer = optax.sgd(0.05, momentum=0.9)
    step = build_train_step(case.make(), optimizer, case.loss_fn, strategy, world, metrics=METRICS)
    assert_same_training(step, case, want, (NUM_STEPS - 1,) * has_gradients)


@pytest.mark.sample(
    "interleaved_1f1b-pp=2-m4-mlp--recompute",
    "1f1b-pp=1-m4-mlp--recompute",
    "zero_bubble_v-pp=2-m4-mlp--residuals",
    "zero_bubble_h1-pp=2,dp=2-m4-weighted-ddp-recompute",
)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_equals_one_device(row):
    check(row, has_gradients=row is ROWS[0])


@pytest.mark.full
@pytest.mark.parametrize("row", dict.fromkeys([*ROWS[1:], *FULL]), ids=str)
def test_equals_one_device_full(row):
    check(row)


@pytest.mark.full
def test_a_searched_table_equals_one_device(tmp_path):
    table = search(2, 8, Costs(f=1, i=2, w=1)).schedule
    assert table.name == "searched"
    (tmp_path / "best.csv").write_text(table.to_csv())
    check(Row(str(tmp_path / "best.csv"), "pp=2", 8, "mlp"))


def build(model, loss_fn, strategy, mesh="pp=2", **options):
    """A step on the mesh."""
    size = math.prod(int(part.split("=")[1]) for part in mesh.split(","))
    world = World.emulate(size, mesh)
    return build_train_step(model, optax.adam(1e-3), loss_fn, strategy, world, **options)


def tokens(samples: int):
    """The shape of a batch of tokens."""
    return {"tokens": jax.ShapeDtypeStruct((samples, 9), jnp.int32)}


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "size"),
    [
        ("1f1b", 2),
        # With two chunks, eight microbatches do not fill eight ranks to the schedule's peak.
        *(
            pytest.param(name, size, marks=pytest.mark.full)
            for name, size in [
                ("zero_bubble_h1", 2),
                ("interleaved_1f1b", 2),
                ("1f1b", 8),
                ("eager_1f1b", 4),
                ("interleaved_1f1b", 4),
                ("zero_bubble_h1", 8),
            ]
        ),
    ],
)
def test_memory_does_not_grow_with_microbatches(schedule, size):
    temp = []
    case = decoder(num_layers=8 if size > 2 else 2, width=64, ffn_width=128)
    for count in (8, 64):
        step = build(case.make, case.loss_fn, pipelined(size, count, schedule), f"pp={size}")
        compiled = step.lower(tokens(2 * count)).compile()
        temp.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temp[1] <= 1.02 * temp[0]


@pytest.mark.full
def test_parameters_and_moments_live_on_their_stages_devices_alone():
    case = MODELS["decoder4"]
    step = build(case.make(), case.loss_fn, pipelined(4, 4), "pp=4")
    state = step.init()
    blocks = state.params["blocks"]
    assert list(blocks) == [0]
    model = nnx.to_pure_dict(nnx.state(case.make(), nnx.Param))
    for leaf, stacked in zip(
        jax.tree.leaves(model["blocks"][2]), jax.tree.leaves(blocks[0]), strict=True
    ):
        (shard,) = [s for s in stacked.addressable_shards if s.index[0] == slice(2, 3, None)]
        np.testing.assert_array_equal(shard.data[0], leaf)
        assert shard.data.shape == (1, *leaf.shape)
    for moment in jax.tree.leaves(state.opt_state):
        assert (
            moment.ndim == 0
            or moment.size < 1024
            or moment.sharding.spec[0] == "pp"
            or ("pp" in moment.sharding.spec)
        )


@pytest.mark.full
def test_merge_gives_the_model_back_exactly():
    case = MODELS["mlp"]
    step = build(case.make(), case.loss_fn, pipelined(2, 4))
    merged = step.merge(step.init())
    assert_close(nnx.state(merged, nnx.Param), nnx.state(case.make(), nnx.Param), 0, "parameter")
    x = jnp.ones((2, 16))
    np.testing.assert_allclose(merged(x), case.make()(x), rtol=1e-6)


@pytest.mark.full
def test_evaluate_equals_the_model():
    case = MODELS["untied"]
    step = build(case.make(), case.loss_fn, pipelined(2, 4))
    loss = case.loss_fn(case.make(), case.batch(0))
    got = step.evaluate(step.init(), case.batch(0))["loss"]
    assert float(got) == pytest.approx(float(loss.total / loss.weight), rel=1e-5)


@pytest.mark.full
def test_a_table_of_ones_own_runs(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(one_f_one_b(2, 4).to_csv())
    pipe = pipelined(2, 4, str(path))
    assert pipe.pipeline.schedule.name == "mine"
    step = build(MODELS["mlp"].make(), MODELS["mlp"].loss_fn, pipe)
    _, metrics = step(step.init(), regression_batch(0))
    want = expected("mlp", 4).losses[0]
    assert float(metrics["loss"]) == pytest.approx(want, rel=1e-5)


@pytest.mark.full
def test_a_table_with_an_idle_rank_runs():
    table = Schedule.from_csv("0F0,0F1,,0B0,0B1\n,,,,\n,1F0+1B0,1F1+1B1,,\n,,,,\n")
    for name in ("mlp", "untied"):
        case = MODELS[name]
        step = build(case.make(), case.loss_fn, pipelined(4, 2, table), "pp=4")
        _, metrics = step(step.init(), case.batch(0))
        assert float(metrics["loss"]) == pytest.approx(expected(name, 2).losses[0], rel=1e-5)


def test_a_batch_along_the_axis_of_the_stages_raises():
    strategy = compose(pipelined(2, 4), ddp("pp"))
    with pytest.raises(StrategyConflictError, match=r"batch over 'pp'.*another axis"):
        build(MODELS["mlp"].make(), mean_square, strategy)


def test_blocks_are_found_by_name_or_class_and_in_lists_of_lists():
    class Layer(nnx.Linear):
        pass

    class Net(nnx.Module):
        def __init__(self):
            make = lambda i: Layer(16, 16, rngs=nnx.Rngs(i))
            self.groups = nnx.List([nnx.List([make(0), make(1)]), nnx.List([make(2)])])
            self.head = nnx.Linear(16, 4, rngs=nnx.Rngs(3))

        def __call__(self, x):
            for group in self.groups:
                for layer in group:
                    x = layer(x)
            return self.head(x)

    want = [("groups", 0, 0), ("groups", 0, 1), ("groups", 1, 0)]
    assert block_keys(Net()) == want
    for classes in ("Layer", Layer, ["Layer"], (Layer,)):
        names = pipelined(2, 4, classes=classes).pipeline.classes
        assert block_keys(Net(), names) == want


@pytest.mark.full
def test_statistics_outside_blocks_are_told_of():
    net = nnx.List([nnx.Linear(16, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 16, rngs=nnx.Rngs(0))])

    class Net(nnx.Module):
        def __init__(self):
            self.blocks, self.norm = net, nnx.BatchNorm(16, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.blocks[1](self.norm(self.blocks[0](x)))[:, :4]

    with pytest.warns(UserWarning, match=r"BatchNorm at .* computes its stat") as told:
        step = build(Net(), mean_square, pipelined(2, 4))
    # The place is the line of the user's, not one of the package.
    assert told[0].filename == __file__
    state, metrics = step(step.init(), regression_batch(0))
    assert np.isfinite(float(metrics["loss"]))
    assert float(jnp.abs(state.buffers["norm"]["mean"]).max()) > 0


def test_too_few_blocks_raise():
    with pytest.raises(UnsupportedError, match=r"4 stages.* 2 blocks.*from_modules"):
        build(MODELS["untied"].make, next_token_loss, pipelined(4, 4), "pp=4")


def test_a_model_without_blocks_raises():
    with pytest.raises(UnsupportedError, match=r"0 blocks.*Linear.*from_modules"):
        build(CASES["dropout"].make(), mean_square, pipelined(2, 4))


def test_blocks_out_of_order_raise():
    class Backwards(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List(nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(3))

        def __call__(self, x):
            for block in reversed(list(self.blocks)):
                x = block(x)
            return x[:, :4]

    step = build(Backwards(), mean_square, pipelined(2, 4))
    with pytest.raises(UnsupportedError, match=r"'blocks/1', a block of stage 0.*batch=\.\.\."):
        step.lower(regression_batch(0))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda x, a, b: nnx.jit(lambda a, b, x: b(a(x)))(a, b, x),
            r"no call of 2.* jit\..*directly",
        ),
        (
            lambda x, a, b: nnx.remat(lambda a, x: a(x))(a, b(x)),
            r"1 of .*blocks/0.*remat.*backward=",
        ),
        (lambda x, a, b: a(x), r"'blocks/1'\) and does not use.*classes="),
        (lambda x, a, b: a(b(a(x))), r"calls 'blocks/0', a block of stage 0.*batch=.*classes="),
        (lambda x, a, b: a(b(x)), r"calls 'blocks/0', a block of stage 0.*batch=.*classes="),
    ],
)
def test_calls_that_a_pipeline_cannot_cut_say_why(run, message):
    class Net(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List(nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(2))

        def __call__(self, x):
            return run(x, *self.blocks)[:, :4]

    with pytest.raises(UnsupportedError, match=message):
        build(Net(), mean_square, pipelined(2, 4)).lower(regression_batch(0))


def test_a_last_block_that_is_not_called_does_not_run():
    """The rows before it are a chain of equal blocks, which alone says nothing of their number."""

    class Penultimate(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List(nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(4))

        def __call__(self, x):
            for block in self.blocks[:-1]:
                x = x + jnp.tanh(block(x))
            return x[:, :4]

    with pytest.raises(UnsupportedError, match=r"no call of 1 of .* 4 blocks \('blocks/3'\)"):
        build(Penultimate(), mean_square, pipelined(2, 4)).lower(regression_batch(0))


def test_mesh_and_schedule_must_agree():
    with pytest.raises(MeshError, match=r"for 4 devices.* 2 along 'pp'"):
        build(MODELS["mlp"].make(), mean_square, pipelined(4, 4))
    with pytest.raises(MeshError, match=r"axis 'pp'.*lacks"):
        build(MODELS["mlp"].make(), mean_square, pipelined(2, 4), "dp=2")


def test_accumulation_must_be_the_pipelines():
    with pytest.raises(StrategyConflictError, match=r"accumulate=2.*4 microbatches"):
        build(MODELS["mlp"].make(), mean_square, pipelined(2, 4), accumulate=2)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
def test_weights_are_gathered_and_gradients_reduced_once_per_step(stage):
    case, mesh = MODELS["mlp"], "pp=2,dp=2"
    strategy = compose(pipelined(2, 8), zero(stage, min_elements=8))
    step = build(case.make(), case.loss_fn, strategy, mesh)
    program = step.lower(regression_batch(0)).compile()
    ledger = collectives(program, step.world.mesh)
    data = [row for row in ledger if row.axes is not None and "dp" in row.axes]
    assert {row.count for row in data} == {1}
    assert not any(row.in_conditional for row in data)
    (vector,) = jax.tree.leaves(step.abstract_state.params)
    own = vector.size // 2 * 4
    kinds = {kind: sum(r.bytes_out for r in data if r.kind == kind) for kind in ledger.by_kind()}
    assert kinds["all-gather"] == pytest.approx(own, rel=0.05)
    assert kinds["reduce-scatter"] == pytest.approx(own / 2, rel=0.05)


def test_gradients_in_buckets_raise():
    strategy = compose(pipelined(2, 4), ddp(bucket_capacity=100))
    with pytest.raises(StrategyConflictError, match=r"bucket_capacity=100.*so leave it out"):
        build(MODELS["mlp"].make(), MODELS["mlp"].loss_fn, strategy, "pp=2,dp=2")


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,dp=2"])
def test_the_loss_scale_acts_on_the_size_of_a_mean(mesh):
    # A microbatch has 64 tokens: the gradient of their sum, times 65536, is no float16 number.
    case = MODELS["untied"]
    strategy = compose(pipelined(2, 4), ddp()) if "dp" in mesh else pipelined(2, 4)
    step = build(case.make(), case.loss_fn, strategy, mesh, precision="fp16")
    state = step.init()
    grads, _ = step.gradients(state, case.batch(0))
    assert_close(step.storage.to_model(grads), expected("untied", 4).grads[0], 2e-2, "gradient")
    state, metrics = step(state, case.batch(0))
    assert float(metrics["loss_scale"]) == 65536
    assert int(state.scaler.skipped) == 0


def test_a_weight_that_depends_on_parameters_raises():
    weigh = lambda model, batch: Weighted(jnp.sum(y := model(batch["x"])), jnp.sum(y**2))
    step = build(MODELS["mlp"].make(), weigh, pipelined(2, 4))
    with pytest.raises(UnsupportedError, match=r"weight of the loss depends on .*'layers/0"):
        step.lower(regression_batch(0))


def test_a_batch_that_does_not_divide_raises():
    step = build(MODELS["mlp"].make(), MODELS["mlp"].loss_fn, pipelined(2, 5))
    with pytest.raises(DivisibilityError, match=r"32 samples.*5 microbatches.*multiple of 5"):
        step.lower(regression_batch(0))


def test_options_of_a_pipeline():
    with pytest.raises(ScheduleError, match="1f1c"):
        pipelined(2, 4, "1f1c")
    with pytest.raises(ConfigError, match=r"for 2 ranks.*given 4 ranks"):
        pipelined(4, 4, one_f_one_b(2, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 3}, r"classes=3.*name of a block class"),
        ({"boundaries": 2}, r"boundaries=2.*list or tuple of which each item is a whole number"),
        ({"boundaries": (0, 1.5, 4)}, r"1\.5.*list or tuple of which each item is a whole number"),
        ({"schedule": "nowhere.csv"}, r"no file 'nowhere\.csv'"),
    ],
)
def test_options_of_another_type_raise(options, message):
    with pytest.raises(ConfigError, match=message):
        pipelined(2, 4, **options)


def test_two_pipelines_conflict_in_few_words():
    with pytest.raises(StrategyConflictError, match=r"'eager_1f1b'.*'gpipe'.*'Block'") as error:
        compose(pipelined(2, 4), pipelined(2, 4, "gpipe", classes="Block"))
    assert len(str(error.value)) < 400


def test_modules_for_a_table_with_chunks_of_unequal_number():
    table = Schedule.from_csv("0F0,,2F0+2B0,,0B0\n,1F0,,1B0,\n")
    linear = lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    pipe = Pipeline.from_modules([linear(), linear(), linear()], 1, table)
    assert (pipe.num_stages(), pipe.schedule.num_devices) == (3, 2)
    with pytest.raises(ConfigError, match=r"4 modules.* 3 stages"):
        Pipeline.from_modules([linear()] * 4, 1, table)
    with pytest.raises(ConfigError, match="got no modules"):
        Pipeline.from_modules([])


@pytest.mark.full
def test_pipeline_from_modules():
    stages = [PipelineStage(nnx.Linear(16, 4, rngs=nnx.Rngs(1)), 1, device_rank=1)]
    stages.append(PipelineStage(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), 0))
    pipe = Pipeline.from_modules(stages, num_microbatches=4)
    assert pipe.num_stages() == 2
    x = regression_batch(0)["x"]
    np.testing.assert_allclose(pipe.forward(x), stages[0](stages[1](x)), rtol=1e-5)
    step = build(pipe.module, mean_square, pipe)
    _, metrics = step(step.init(), regression_batch(0))
    want = mean_square(pipe, regression_batch(0))
    assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-5)


def test_stages_that_do_not_fit_raise():
    linear = lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match=r"stage ids \[0, 2\].*0\.\.1"):
        Pipeline.from_modules([PipelineStage(linear(), 0), PipelineStage(linear(), 2)], 4)
    with pytest.raises(ConfigError, match=r"asks for rank 0.*on rank 1"):
        Pipeline.from_modules([linear(), PipelineStage(linear(), 1, device_rank=0)], 4)
    with pytest.raises(ConfigError, match=r"3 stages and 2 chunks.*multiple of 2"):
        Pipeline.from_modules([linear()] * 3, 4, "interleaved_1f1b")


def test_blocks_that_are_numbered_by_name():
    class Net(nnx.Module):
        def __init__(self):
            for number in range(11):
                setattr(self, f"layer_{number}", nnx.Linear(2, 2, rngs=nnx.Rngs(0)))

    assert block_keys(Net(), ("Linear",)) == [(f"layer_{number}",) for number in range(11)]
