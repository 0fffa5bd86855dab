"""deterministic="elastic": the bits of a run do not depend on how many ranks there are."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import MixedPrecision, Weighted, World, build_train_step, muon
from axon_dist.checkpoint import load_checkpoint, save_checkpoint
from axon_dist.core.errors import AxonDistError, ConfigError, DivisibilityError, UnsupportedError
from axon_dist.core.tree import is_key
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.optim import Spikes, watched
from axon_dist.parallel import compose, ddp, fsdp, local_sgd, pipelined, tensor_parallel, zero
from axon_dist.step import deterministic_options

LAYOUTS = {
    "dp=1": (ddp(), 1),
    "dp=2": (ddp(), 1),
    "dp=4": (ddp(), 1),
    "dp=8": (ddp(), 1),
    "fsdp=2": (fsdp(min_elements=8), 1),
    "fsdp=4": (fsdp(min_elements=8), 1),
    "fsdp=8": (fsdp(min_elements=8), 1),
    "dp=2,fsdp=2": (fsdp("hybrid_shard", ("dp", "fsdp"), min_elements=8), 1),
    "dp=2,fsdp=4": (fsdp("full_shard", ("dp", "fsdp"), min_elements=8), 1),
    "fsdp=2,dp=4": (compose(ddp(), fsdp(min_elements=8)), 1),
    "dp=2 accumulate": (ddp(), 4),
    "dp=4 zero1 accumulate": (zero(1, min_elements=8), 2),
}


class Net(nnx.Module):
    """The operations whose bits depended on their surroundings: softmax, means, dropout, ties."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.table = nnx.Embed(16, 8, rngs=rngs)
        self.norm, self.up = nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        x = self.dropout(self.norm(self.table(x)))
        return self.table.attend(x + jax.nn.softmax(x @ x.mT) @ nnx.gelu(self.up(x)))


def loss_fn(model, batch):
    """Shards weigh differently, and a metric is weighed by the loss."""
    logits, labels, weight = model(batch["x"]), batch["y"], batch["w"][:, None]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels) * weight
    hits = jnp.mean(logits.argmax(-1) == labels, dtype=jnp.float32)
    return Weighted(losses.sum(), weight.sum() * labels.shape[1]), {"hits": hits}


def batch_of(number, size=8):
    rng = np.random.default_rng(number)
    x, y = rng.integers(0, 16, (2, size, 4)).astype(np.int32)
    return {"x": x, "y": y, "w": rng.random(size).astype(np.float32)}


def build(mesh, strategy, optimizer=None, shards=4, loss_fn=loss_fn, model=Net, **options):
    mesh = mesh.partition(" ")[0]
    size = np.prod([int(axis.partition("=")[2]) for axis in mesh.split(",")])
    options = {"metrics": ("loss", "grad_norm", "param_norm"), "clip_norm": 0.5, **options}
    return build_train_step(
        model, optimizer or optax.adamw(0.01), loss_fn, strategy, World.emulate(int(size), mesh),
        deterministic="elastic", logical_shards=shards, **options,
    )  # fmt: skip


def bits_of(step, batches, state=None):
    """The bytes of all metrics of all steps, and of the state, by name."""
    state, seen = step.init() if state is None else state, []
    for batch in batches:
        state, metrics = step(state, batch)
        seen.append({name: np.asarray(x).tobytes() for name, x in metrics.items()})
    kept = state.params, state.opt_state, state.buffers if state.ema is None else state.ema
    kept = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, kept)
    leaves = jax.tree_util.tree_leaves_with_path(kept)
    return seen, {jax.tree_util.keystr(keys): np.asarray(x).tobytes() for keys, x in leaves}, state


OPTIMIZERS = {"adamw": lambda: optax.adamw(0.01), "sgd": lambda: optax.sgd(0.1, momentum=0.9)}


@functools.cache
def alone(optimizer):
    return bits_of(build("dp=1", ddp(), OPTIMIZERS[optimizer]()), map(batch_of, range(3)))[:2]


# The default run compares the same bits, and more, of a step that is watched, below.
@pytest.mark.full
@pytest.mark.parametrize(
    ("optimizer", "mesh"),
    [
        ("adamw", "dp=4"),
        ("adamw", "fsdp=2"),
        ("adamw", "dp=2"),
        ("adamw", "fsdp=4"),
        ("sgd", "dp=4"),
        ("sgd", "fsdp=2"),
    ],
)
def test_bits_are_those_of_one_rank(optimizer, mesh):
    step = build(mesh, LAYOUTS[mesh][0], OPTIMIZERS[optimizer]())
    assert bits_of(step, map(batch_of, range(3)))[:2] == alone(optimizer)


@functools.cache
def watched_bits(mesh):
    names = {"metrics": ("loss", "grad_norm", "param_norm", "norms_by_layer")}
    optimizer = watched(optax.adamw(0.01), spikes=Spikes(window=2))
    step = build(mesh, LAYOUTS[mesh][0], optimizer, **names)
    return bits_of(step, map(batch_of, range(3)))[:2]


# The norms of whole and of split gradients are those of the same shards.
@pytest.mark.sample("fsdp=2")
@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2"])
def test_bits_of_a_watched_step_are_those_of_one_rank(mesh):
    found = watched_bits(mesh)
    assert found == watched_bits("dp=1")
    names = {"grad_norm/up", "param_norm/up", "update_norm/up", "spike"}
    assert names <= found[0][0].keys()


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2"])
def test_norms_by_layer_and_spikes_change_no_bit(mesh):
    found = watched_bits(mesh)
    unwatched, state = alone("adamw")
    assert [{name: row[name] for name in unwatched[0]} for row in found[0]] == unwatched
    inner = {path.replace("[1].inner[0]", "[1]", 1): x for path, x in found[1].items()}
    assert {path: x for path, x in inner.items() if path in state} == state


@pytest.mark.full
def test_it_trains_as_one_device_does():
    """The numbers are those of a plain step, but for the order of sums."""
    names = ("loss", "grad_norm")
    plain = build_train_step(
        Net, optax.adamw(0.01), loss_fn, ddp(), World.emulate(1), clip_norm=0.5, metrics=names
    )
    found = [bits_of(plain, map(batch_of, range(3)))[0], alone("adamw")[0]]
    losses = [
        [[np.frombuffer(step[name], np.float32)[0] for name in (*names, "hits")] for step in steps]
        for steps in found
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


CONFIG = TransformerConfig(
    vocab_size=64, width=32, num_layers=2, num_heads=2, ffn_width=64, max_length=16, dropout=0.1
)


def transformer_bits(name, steps, batches=16):
    strategy, accumulate = LAYOUTS[name]
    step = build(
        name, strategy, shards=8, model=lambda: Transformer(CONFIG, rngs=nnx.Rngs(0)),
        loss_fn=next_token_loss, accumulate=accumulate, ema=0.99,
    )  # fmt: skip

    def tokens(number):
        rows = np.random.default_rng(number).integers(0, 64, (batches, 17))
        return {"tokens": rows.astype(np.int32)}

    return bits_of(step, map(tokens, range(steps)))[:2]


@functools.cache
def transformer_alone():
    return transformer_bits("dp=1", 100)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "dp=1"])
def test_twelve_layouts_have_the_same_bits_over_100_steps(name):
    assert transformer_bits(name, 100) == transformer_alone()


@pytest.mark.full
def test_a_checkpoint_goes_on_with_fewer_ranks(tmp_path):
    """Ten steps of 8 ranks and ten of 4 are twenty of one, to the bit."""
    optimizer, batch_of_16 = optax.adamw(0.01), functools.partial(batch_of, size=16)
    eight, four = (build(f"dp={n}", ddp(), optimizer, shards=8) for n in (8, 4))
    state = bits_of(eight, map(batch_of_16, range(10)))[2]
    save_checkpoint(tmp_path / "run", state)
    state = load_checkpoint(tmp_path / "run", four.init())
    found = bits_of(four, map(batch_of_16, range(10, 20)), state)
    one = bits_of(build("dp=1", ddp(), optimizer, shards=8), map(batch_of_16, range(20)))
    assert (found[0], found[1]) == (one[0][10:], one[1])


class Normed(nnx.Module):
    def __init__(self):
        self.table, self.norm = (
            nnx.Embed(16, 8, rngs=nnx.Rngs(0)),
            nnx.BatchNorm(8, rngs=nnx.Rngs(0)),
        )

    def __call__(self, x):
        return self.table.attend(self.norm(self.table(x)))


def coupled(model, batch):
    scores = model(batch["x"]).mean((1, 2))
    return jnp.mean(jax.nn.logsumexp(scores[:, None] - scores[None], axis=1))


REFUSED = {
    "replicas": (
        dict(mesh="nodes=2,dp=2", strategy=compose(local_sgd(every=2), ddp())),
        "replicas over 'nodes' train each on its own samples",
    ),
    "tensor": (
        dict(mesh="dp=2,tp=2", strategy=compose(ddp(), tensor_parallel({"up": "column"}))),
        "splits sums within a sample over ranks, as tensor, context and expert parallelism do",
    ),
    "pipeline": (
        dict(mesh="dp=2,pp=2", strategy=compose(ddp(), pipelined(2, 2))),
        "a pipeline over 'pp' adds up microbatches in the order of its schedule",
    ),
    "axis": (
        dict(mesh="dp=2,tp=2", strategy=ddp()),
        "splits samples over dp alone",
    ),
    "ranks": (
        dict(mesh="dp=8", strategy=ddp()),
        "logical_shards=4 do not divide over 8 ranks, each of which adds up a whole subtree",
    ),
    "three": (
        dict(mesh="dp=3", strategy=ddp()),
        "use a power of two of ranks and microbatches, up to 4 together",
    ),
    "accumulate": (
        dict(mesh="dp=2", strategy=ddp(), accumulate=4),
        "do not divide over 2 ranks x accumulate=4",
    ),
    "pad": (dict(mesh="dp=2", strategy=ddp(), pad="w"), "leave pad out, and give batches"),
    "wire": (
        dict(mesh="dp=2", strategy=ddp(reduce_dtype="bfloat16")),
        "are sent in bfloat16, and are then rounded between ranks",
    ),
    "buckets": (
        dict(mesh="dp=2", strategy=ddp(bucket_capacity=100)),
        "bucket_capacity=100, sync=SYNCHRONOUS and broadcast_buffers=True set how ranks reduce",
    ),
    "fp8": (
        dict(
            mesh="dp=2", strategy=ddp(), precision=MixedPrecision.fp8(), loss_fn=next_token_loss,
            model=lambda: Transformer(CONFIG, rngs=nnx.Rngs(0)),
        ),
        "products in fp8 take their scales from the samples of all ranks",
    ),
    "norm": (
        dict(mesh="dp=2", strategy=ddp(), optimizer=optax.chain(
            optax.clip_by_global_norm(1.0), optax.sgd(0.1))),
        "its 'reduce_sum' depends on several elements of an array, or on their places",
    ),
    "muon": (dict(mesh="dp=2", strategy=ddp(), optimizer=muon(0.1)), "not work element by element"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_hold_is_refused_at_build(case):
    given, words = REFUSED[case]
    with pytest.raises(AxonDistError) as caught:
        build(**given)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            dict(deterministic="elastik"),
            "deterministic='elastik', a str; give True or False, or 'elastic'",
        ),
        (dict(deterministic=1), "deterministic=1, an int; give True or False, or 'elastic'"),
        (dict(deterministic="elastic"), "logical_shards is None, but deterministic is 'elastic'"),
        (dict(deterministic="elastic", logical_shards=6), "a power of two, such as 8"),
        (dict(logical_shards=8), "logical_shards is 8, but deterministic is False"),
    ],
)
def test_options_have_possible_values(options, words):
    with pytest.raises(ConfigError, match=words):
        build_train_step(Net, optax.sgd(0.1), loss_fn, ddp(), World.emulate(2), **options)


def test_other_devices_are_refused():
    world = types.SimpleNamespace(backend="nccl", is_cpu=False)
    with pytest.raises(UnsupportedError, match="have been shown only on CPUs"):
        deterministic_options(world, "elastic")


@pytest.mark.parametrize(
    ("model", "loss", "words"),
    [
        (Normed, loss_fn, "statistics"),
        (Net, coupled, 'as deterministic="elastic" requires'),
    ],
)
def test_losses_that_couple_samples_are_refused(model, loss, words):
    with pytest.raises(UnsupportedError) as caught:
        build("dp=2", ddp(), model=model, loss_fn=loss, batch=batch_of(0))
    assert words in str(caught.value)


def test_batches_divide_by_the_shards():
    step = build("dp=2", ddp(), shards=8)
    with pytest.raises(DivisibilityError, match="dp=2 and 8 logical shards; make it a positive mu"):
        step.place(batch_of(0, size=12))
