"""Separation of the losses of this project's models, and of foreign ones."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import Weighted, World, build_train_step, ddp, fsdp, per_sample
from axon_dist.core.errors import AxonDistWarning, ConfigError, UnsupportedError
from axon_dist.inspect import separation
from axon_dist.models import (
    ExpertConfig,
    ResNet,
    ResNetConfig,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
    classification_loss,
    next_token_loss,
)
from axon_dist.parallel import mark_experts_per_sample
from axon_dist.separability.abstract_values import Dependence
from axon_dist.step.model_spec import split_model
from axon_dist.step.sample_traces import Traces
from tests.drawn import drawn

from ..contracts.models import CASES, token_batch, transformer
from ..contracts.reference import assert_close, train

IMAGES = {"x": np.zeros((4, 16, 16, 3), np.uint8), "y": np.zeros(4, np.int32)}


def found(make, loss_fn, batch):
    """How a loss depends on its samples, where a rank has two of six samples."""
    return Traces(split_model(make)[0], loss_fn).dependence(batch, (2, 6))


@pytest.mark.parametrize("name", CASES)
def test_the_models_of_the_contracts_are_separable(name):
    case = CASES[name]
    assert found(case.make, case.loss_fn, case.batch(0)).why_coupled == ""


def test_experts_are_separable_where_they_count_the_tokens_of_all_ranks():
    config = ExpertConfig(count=4, z_loss=0.1, bias_rate=0.1)
    make = lambda: transformer(experts=config, vocab_size=32)
    traces = Traces(split_model(make)[0], next_token_loss, mark_experts_per_sample)
    apart = traces.dependence(token_batch(0), (2, 6))
    assert apart.why_coupled == ""
    assert apart.loss.kind is Dependence.WEIGHTED
    assert {dependence.kind for dependence in apart.metrics.values()} == {Dependence.CONSTANT}
    # Sorting tokens by experts is not promised to keep samples separate.
    assert "routing.py" in found(make, next_token_loss, token_batch(0)).why_coupled


@pytest.mark.full
def test_image_models_are_separable():
    vit = dataclasses.replace(ViTConfig.preset("tiny"), image_size=16, patch_size=8, dropout=0.1)
    resnet = ResNetConfig.preset("tiny")
    for make in (
        lambda: ViT(vit, rngs=nnx.Rngs(0, dropout=1)),
        lambda: ResNet(resnet, rngs=nnx.Rngs(0)),
    ):
        dependence = found(make, classification_loss, IMAGES)
        assert dependence.why_coupled == ""
        assert dependence.loss.kind is Dependence.MEAN


def test_a_decoder_with_dropout_in_half_precision_is_separable():
    config = dataclasses.replace(TransformerConfig.preset("tiny"), dropout=0.1)
    make = lambda: Transformer(config, rngs=nnx.Rngs(0, dropout=1))
    dependence = found(make, next_token_loss, CASES["transformer"].batch(0))
    assert (dependence.loss.kind, dependence.why_coupled) == (Dependence.WEIGHTED, "")


def test_statistics_of_a_mask_are_not_those_of_all_ranks():
    """Flax averages the means of the ranks, however many samples each mask leaves."""

    class Masked(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(3, rngs=rngs)

        def __call__(self, x):
            return self.norm(x, mask=x[:, :1] > 0)

    dependence = found(
        lambda: Masked(nnx.Rngs(0)), lambda m, b: jnp.mean(m(b["x"]) ** 2), {"x": jnp.ones((4, 3))}
    )
    assert dependence.loss.kind is Dependence.COUPLED


class LinenNorm(nn.Module):
    """Batch statistics that no one outside can average."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x)))


@pytest.mark.full
def test_batch_norm_of_a_bridged_model_runs_in_global_view():
    def make():
        model = nnx.bridge.ToNNX(LinenNorm(), rngs=nnx.Rngs(0))
        return model.lazy_init(jnp.ones((2, 16)), mutable=["batch_stats"])

    def loss_fn(model, batch):
        return jnp.mean((model(batch["x"], mutable=["batch_stats"]) - batch["y"]) ** 2)

    case = dataclasses.replace(CASES["linen"], make=make, loss_fn=loss_fn)
    world = World.emulate(2, "dp=2")
    step = build_train_step(make(), optax.sgd(0.1), loss_fn, ddp(), world, accumulate=2)
    with pytest.warns(AxonDistWarning, match="'BatchNorm_0/mean'.* each of 2 microbatches"):
        assert str(separation(step, case.batch(0))).startswith("global view, because the loss")
    want = train(case, optax.sgd(0.1), 1, accumulate=2)
    state, metrics = step(step.init(), case.batch(0))
    assert float(metrics["loss"]) == pytest.approx(want.losses[0], rel=1e-5)
    assert_close(state.params, want.params, 1e-5, "parameter")
    assert_close(state.buffers, want.buffers, 1e-5, "buffer")


def test_arrays_from_outside_may_lie_anywhere():
    """A constant of the loss on a mesh, and statistics that are averaged."""
    world = World.emulate(2, "dp=2")
    spread = jax.device_put(
        jnp.ones(4), jax.NamedSharding(world.mesh, jax.sharding.PartitionSpec("dp"))
    )
    case = CASES["batchnorm"]
    loss_fn = lambda m, b: jnp.mean((m(b["x"]) * spread - b["y"]) ** 2)
    assert found(case.make, loss_fn, case.batch(0)).why_coupled == ""


def test_nothing_is_looked_at_where_nothing_is_cut():
    case = CASES["mlp"]
    calls = []

    def loss_fn(model, batch):
        calls.append(len(batch["x"]))
        return case.loss_fn(model, batch)

    step = build_train_step(mlp(), optax.sgd(0.1), loss_fn, ddp(), World.emulate(4, "dp=4"))
    assert str(separation(step, case.batch(0))) == "global view"
    assert calls == []
    cut = build_train_step(
        mlp(), optax.sgd(0.1), loss_fn, ddp(), World.emulate(4, "dp=4"), accumulate=2
    )
    first = separation(cut, case.batch(0))
    assert separation(cut, case.batch(1)) is first
    assert calls == [32, 4]


def test_a_promise_is_true_or_false():
    case = CASES["mlp"]
    with pytest.raises(ConfigError, match="got separable='yes', a str; give True or False, or"):
        build_train_step(
            mlp(), optax.sgd(0.1), case.loss_fn, ddp(), World.emulate(2, "dp=2"), separable="yes",
        )  # fmt: skip


@functools.cache
def mlp():
    """The model of the case, drawn once for the steps and references of several tests."""
    return drawn(CASES["mlp"].make)


def split_in(num_microbatches, loss_fn, axes="dp=2", strategy=None, **options):
    strategy = strategy or ddp()
    return build_train_step(
        mlp(), optax.sgd(0.1), loss_fn, strategy, World.emulate(2, axes),
        accumulate=num_microbatches, **options,
    )  # fmt: skip


@pytest.mark.sample("buckets-its root-1", "ddp-the size-4")
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(
    ("weight", "divided"),
    [(lambda x: 16.0, 16), (lambda x: float(len(x)), 32), (lambda x: len(x) ** 0.5, 32**0.5)],
    ids=["a number", "the size", "its root"],
)  # fmt: skip
@pytest.mark.parametrize("strategy", [ddp(), ddp(bucket_capacity=64)], ids=["ddp", "buckets"])
def test_the_weight_of_a_batch_is_that_of_its_parts(weight, divided, strategy, count):
    """Also one that is not a sum over the samples."""
    case = CASES["mlp"]
    error = lambda m, b: jnp.sum((m(b["x"]) - b["y"]) ** 2)
    loss_fn = lambda m, b: Weighted(error(m, b), weight(b["x"]))
    want = float(nnx.jit(error)(mlp(), case.batch(0))) / divided
    step = split_in(count, loss_fn, strategy=strategy)
    _, metrics = step(step.init(), case.batch(0))
    assert float(metrics["loss"]) == pytest.approx(want, rel=1e-5)


def test_separable_false_averages_the_metrics_of_microbatches():
    case = CASES["mlp"]
    spread = lambda m, b: jnp.std(m(b["x"]) - b["y"])
    with pytest.raises(UnsupportedError, match=r"2 microbatches of 16 samples .*separable=False"):
        separation(split_in(2, spread), case.batch(0))
    said = separation(split_in(2, spread, separable=False), case.batch(0))
    assert "averaged over microbatches" in str(said)


# What is declared of parts is read of ranks in buckets as of microbatches.
@pytest.mark.sample("False", "buckets")
@pytest.mark.parametrize(
    ("strategy", "count", "separable"),
    [(ddp(), 2, False), (ddp(), 2, True), (ddp(bucket_capacity=64), 1, True)],
    ids=["False", "True", "buckets"],
)
def test_what_separable_declares_of_the_loss_leaves_metrics_that_follow_from_sums(
    strategy, count, separable
):
    case = CASES["mlp"]
    batch = case.batch(0)
    # Parts of unequal losses.
    batch["y"] = batch["y"] * np.linspace(0, 3, len(batch["y"]), dtype=np.float32)[:, None]

    def loss_fn(model, batch):
        each = jnp.mean((model(batch["x"]) - batch["y"]) ** 2, -1)
        metrics = {"exp": jnp.exp(each.mean()), "worst": each.max(), "mean": each.mean()}
        return jnp.sqrt(each.mean()), metrics

    step = split_in(count, loss_fn, strategy=strategy, separable=separable)
    _, metrics = step(step.init(), batch)
    loss, want = nnx.jit(loss_fn)(mlp(), batch)
    for name in ("exp", "mean"):
        assert float(metrics[name]) == pytest.approx(float(want[name]), rel=1e-5), name
    # The mean over the parts, as declared: less than that of the whole.
    assert float(metrics["loss"]) < float(loss) * 0.99
    assert float(metrics["worst"]) < float(want["worst"])
    said = str(separation(step, batch))
    assert ("averaged over microbatches because the loss" in said) == (separable is False)


@pytest.mark.parametrize("strategy", [ddp(), ddp(bucket_capacity=64)], ids=["ddp", "buckets"])
def test_a_loss_that_wants_the_whole_batch_is_not_cut(strategy):
    case = CASES["mlp"]
    fixed = lambda m, b: jnp.mean((m(b["x"]) - b["y"]) ** 2 * jnp.arange(32.0)[:, None])
    with pytest.raises(
        UnsupportedError, match=r"cannot be computed for a microbatch, which has 16 s"
    ):
        separation(split_in(2, fixed, strategy=strategy), case.batch(0))
    with pytest.raises(ZeroDivisionError):  # The user's own, whatever the samples.
        separation(split_in(2, lambda m, b: 1 / 0, strategy=strategy), case.batch(0))
    wrong = lambda m, b: m(b["x"]) @ b["nothing"]
    with pytest.raises(ConfigError, match=r"looks up .nothing."):
        separation(split_in(1, wrong, strategy=ddp(bucket_capacity=64)), case.batch(0))


def test_microbatches_do_not_each_read_the_first_rows_of_a_table():
    case = CASES["mlp"]
    weights = lambda b: jnp.arange(64.0)[: len(b["x"]), None]
    read = lambda m, b: jnp.mean((m(b["x"]) - b["y"]) ** 2 * weights(b))
    with pytest.raises(UnsupportedError, match="depends on a sample's position in the batch"):
        separation(split_in(2, read), case.batch(0))


def test_a_loss_of_microbatches_alone_is_their_mean_with_a_warning():
    case = CASES["mlp"]
    fixed = lambda m, b: jnp.sum((m(b["x"]) - b["y"]) ** 2 * jnp.arange(16.0)[:, None])
    step, batch = split_in(2, fixed), case.batch(0)
    with pytest.warns(AxonDistWarning, match=r"32 samples of a batch, only for the 16 of") as seen:
        _, metrics = step(step.init(), batch)
    assert [one.message.code for one in seen] == ["loss-of-one-size"]
    halves = [{name: x[part] for name, x in batch.items()} for part in (slice(16), slice(16, 32))]
    alone = nnx.jit(fixed)
    mean = sum(float(alone(mlp(), half)) for half in halves) / 2
    assert float(metrics["loss"]) == pytest.approx(mean, rel=1e-5)


def test_numbers_of_python_in_a_program_are_read():
    """`jax.random.poisson` has literals without a dtype."""
    case = CASES["mlp"]
    key = jax.random.key(0)
    noisy = lambda m, b: jnp.mean(
        (m(b["x"]) - b["y"]) ** 2 * jax.random.poisson(key, 2.0, b["y"].shape)
    )
    with pytest.raises(UnsupportedError, match="2 microbatches of 16 samples do not give"):
        separation(split_in(2, noisy), case.batch(0))


def test_a_marked_function_draws_nothing():
    case, key = CASES["mlp"], jax.random.key(0)
    scaled = per_sample(lambda e: e * jax.random.gamma(key, 2.0, e.shape))
    noisy = lambda m, b: jnp.mean(scaled(jnp.sum((m(b["x"]) - b["y"]) ** 2, -1)))
    with pytest.raises(
        UnsupportedError, match=r"draws random numbers \(`random_.*draw them before"
    ):
        separation(split_in(1, noisy, strategy=ddp(bucket_capacity=64)), case.batch(0))


@pytest.mark.parametrize("held", [False, True])
def test_a_weight_that_moves_with_the_parameters_is_refused(held):
    case = CASES["mlp"]
    stop = jax.lax.stop_gradient if held else lambda x: x
    sure = lambda m, b: jnp.sum(jax.nn.sigmoid(stop(m(b["x"]))[:, 0]))
    loss_fn = lambda m, b: Weighted(jnp.sum((m(b["x"]) - b["y"]) ** 2), sure(m, b))
    step = split_in(2, loss_fn)
    if held:
        assert str(separation(step, case.batch(0))) == "per rank"
    else:
        with pytest.raises(UnsupportedError, match=r"the weight of the loss depends on the param"):
            separation(step, case.batch(0))


@pytest.mark.parametrize("value", [{"b": 1.0}, "high", None])
def test_metrics_are_numbers(value):
    case = CASES["mlp"]
    loss_fn = lambda m, b: (jnp.mean(m(b["x"])), {"a": value})
    with pytest.raises(ConfigError, match=r"a metric 'a' that is a \w+; it must be a scalar. Give"):
        separation(split_in(2, loss_fn), case.batch(0))


@pytest.mark.sample("ddp0")
@pytest.mark.parametrize(
    "strategy", [ddp(), ddp(bucket_capacity=64), ddp(sync="overlapped")], ids=lambda s: s.name
)
def test_unequal_weights_with_statistics_of_all_ranks(strategy):
    """Gradients that come back through the statistics are of the losses of other ranks."""
    case = CASES["batchnorm"]
    error = lambda m, b: jnp.sum((m(b["x"]) - b["y"]) ** 2, -1)
    heavy = lambda b: jax.nn.relu(b["x"][:, 0]) ** 2 + 0.01
    loss_fn = lambda m, b: Weighted(jnp.sum(error(m, b) * heavy(b)), jnp.sum(heavy(b)))
    case = dataclasses.replace(case, make=lambda make=case.make: drawn(make), loss_fn=loss_fn)
    step = build_train_step(
        case.make(), optax.sgd(0.1), loss_fn, strategy, World.emulate(2, "dp=2"), accumulate=2
    )
    assert str(separation(step, case.batch(0))) == "per rank"
    want = train(case, optax.sgd(0.1), 2, accumulate=2)
    state = step.init()
    for number in range(2):
        state, metrics = step(state, case.batch(number))
        assert float(metrics["loss"]) == pytest.approx(want.losses[number], rel=1e-5)
    assert_close(state.params, want.params, 1e-5, "parameter")


@pytest.mark.full
@pytest.mark.parametrize(
    ("is_weighted", "separable", "is_right"),
    [(False, None, True), (False, True, False), (True, True, True), (True, None, True)],
)
def test_a_mask_that_selects_nothing_of_a_microbatch(is_weighted, separable, is_right):
    """The claims of the docstring of `separable` about a promise, and about `Weighted` instead."""
    selected = jnp.repeat(jnp.array([1.0, 0.0]), 4)
    batch = CASES["batchnorm"].batch(0)
    batch = {"x": batch["x"][:8], "y": batch["y"][:8], "mask": selected}
    layer = lambda: nnx.Linear(*(batch[name].shape[-1] for name in "xy"), rngs=nnx.Rngs(0))

    def loss_fn(model, batch):
        errors = jnp.sum((model(batch["x"]) - batch["y"]) ** 2, -1) * batch["mask"]
        total, count = jnp.sum(errors), jnp.sum(batch["mask"])
        return Weighted(total, count) if is_weighted else total / count

    step = build_train_step(
        layer, optax.sgd(0.1), loss_fn, ddp(), World.emulate(1), accumulate=2, separable=separable
    )
    state, metrics = step(step.init(), batch)
    loss = loss_fn(layer(), batch)
    want = float(loss.total / loss.weight if is_weighted else loss)
    assert float(metrics["loss"]) == (
        pytest.approx(want, rel=1e-5) if is_right else pytest.approx(np.nan, nan_ok=True)
    )
    assert np.isfinite(state.params["kernel"]).all() == is_right


class Seen(nnx.Variable):
    pass


class Counting(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        self.seen = Seen(jnp.zeros((), jnp.int32))


def counted(read, change):
    def loss(model, batch):
        before = model.seen[...]
        model.seen[...] = change(before, jnp.sum(batch["x"] > 0))
        return jnp.mean(model.layer(batch["x"]) ** 2) / (1 + before if read else 1)

    return loss


@pytest.mark.parametrize(
    ("read", "change", "words"),
    [
        (
            True,
            lambda seen, new: seen + new,
            "buffer 'seen' depends on the samples, and is read by some",
        ),
        (
            False,
            lambda seen, new: new,
            "is overwritten by a value that depends on the samples. 2 microbatches",
        ),
        (
            False,
            lambda seen, new: 2 * seen + new,
            "depends on the samples, and is not a sum over them",
        ),
        (False, lambda seen, new: seen + new // 2, "and is not a sum over them .takes `"),
        (False, jnp.maximum, "depends on the samples, and is not a sum over them"),
        (False, lambda seen, new: jax.jit(jnp.add)(new.astype(seen.dtype), seen), ""),
        (False, lambda seen, new: seen - new, ""),
        (True, lambda seen, new: seen + 1, ""),
    ],
    ids=["read", "overwritten", "doubled", "halves", "largest", "added to", "taken", "calls"],
)
def test_a_count_of_samples_is_not_read_between_microbatches(read, change, words):
    def build(**options):
        loss, batch = counted(read, change), {"x": np.ones((8, 4), np.float32)}
        world = World.emulate(2)
        return build_train_step(
            Counting, optax.sgd(0.1), loss, ddp(), world, accumulate=2, batch=batch, **options
        )

    if not words:
        build()
        return
    with pytest.raises(UnsupportedError, match=words):
        build()
    build(separable=False)


@pytest.mark.parametrize(
    ("read", "change", "words"),
    [
        (True, lambda at, n: (at + n) % 24, "depends on the number of samples, and is read by so"),
        (False, lambda at, n: at * 0 + n, "depends on the number of samples, and is not a sum"),
        (False, lambda at, n: n, "is overwritten by a value that depends on the number of samples"),
    ],
    ids=["read", "not added", "overwritten"],
)
def test_a_count_that_reads_no_sample_is_said_to_depend_on_their_number(read, change, words):
    def loss(model, batch):
        before = model.seen[...]
        model.seen[...] = jnp.int32(change(before, len(batch["x"])))
        return jnp.mean(model.layer(batch["x"]) ** 2) / (1 + before if read else 1)

    batch = {"x": np.ones((8, 4), np.float32)}
    with pytest.raises(UnsupportedError, match=f"buffer 'seen' {words}"):
        build_train_step(
            Counting, optax.sgd(0.1), loss, ddp(), World.emulate(2), accumulate=2, batch=batch
        )


class Meters(nnx.Module):
    """Keeps running sums and running means of its batches, in floating-point numbers."""

    def __init__(self, rngs=None):
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.layer = nnx.Linear(4, 5, rngs=rngs)
        self.accuracy = nnx.metrics.Accuracy()
        self.several = nnx.metrics.MultiMetric(
            loss=nnx.metrics.Average("loss"), hits=nnx.metrics.Accuracy()
        )
        self.total, self.samples, self.decayed, self.mean = (
            Seen(jnp.zeros(shape)) for shape in ((5,), (), (5,), ())
        )


def metered(model, batch):
    logits = model.layer(batch["x"])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    model.accuracy.update(logits=logits, labels=batch["y"])
    model.several.update(loss=each, logits=logits, labels=batch["y"])
    model.total[...] += logits.sum(0)
    model.samples[...] += len(logits)
    model.decayed[...] = 0.9 * model.decayed[...] + 0.1 * logits.mean(0)
    model.mean[...] += each.mean()
    return each.mean()


METERED = dataclasses.replace(
    CASES["mlp"],
    make=lambda: drawn(Meters),
    loss_fn=metered,
    batch=lambda number: {
        "x": np.random.default_rng(number).normal(size=(16, 4)).astype(np.float32),
        "y": np.random.default_rng(number).integers(0, 5, 16),
    },
)


@pytest.mark.sample("2-fsdp")
@pytest.mark.parametrize("strategy", [ddp, fsdp], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_sums_and_means_that_a_model_keeps_are_those_of_one_device(strategy, accumulate):
    """A mean that decays once per step must not be taken for a sum, to which each part adds."""
    axis = {ddp: "dp", fsdp: "fsdp"}[strategy]
    step = build_train_step(
        METERED.make(), optax.sgd(0.1), metered, strategy(), World.emulate(2, f"{axis}=2"),
        accumulate=accumulate,
    )  # fmt: skip
    state = step.init()
    for number in range(2):
        state, _ = step(state, METERED.batch(number))
    want = train(METERED, optax.sgd(0.1), 2)
    assert_close(state.buffers, want.buffers, 1e-5, "buffer")
    assert int(state.buffers["accuracy"]["count"]) == 32


@pytest.mark.full
def test_ranks_that_compute_alone_add_up_the_sums_that_a_model_keeps():
    def summed(model, batch):
        loss = metered(model, batch)
        # What a rank cannot know of the whole batch stays as it was.
        model.decayed[...], model.mean[...] = jnp.zeros(5), jnp.zeros(())
        return loss

    case = dataclasses.replace(METERED, loss_fn=summed)
    for separable in (None, True):
        step = build_train_step(
            METERED.make(), optax.sgd(0.1), summed, ddp(bucket_capacity=100),
            World.emulate(4, "dp=4"), accumulate=2, separable=separable,
        )  # fmt: skip
        assert str(separation(step, case.batch(0))) == "per rank"
        state = step.init()
        for number in range(2):
            state, _ = step(state, case.batch(number))
        assert_close(state.buffers, train(case, optax.sgd(0.1), 2).buffers, 1e-5, "buffer")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda seen, x: 0.9 * seen + x.sum(), "adds a sum over the samples to a value that does"),
        (lambda seen, x: 0.9 * seen + 0.1 * x.max(), "takes `reduce_max` over the samples"),
        (lambda seen, x: seen + x.sum() / (x**2).mean(), "combines a sum over the samples with i"),
        (lambda seen, x: seen + x.sum() ** 2, "of a total over the samples"),
        pytest.param(
            *(lambda seen, x: jnp.maximum(seen, x.sum()), "of a total over the samples"),
            marks=pytest.mark.full,
        ),
        (lambda seen, x: jnp.floor(seen + x.sum()), "adds a sum over the samples"),
        (lambda seen, x: (seen + x.sum()).astype(int).astype(float), "adds a sum over the samples"),
        (lambda seen, x: x.sum(), "changes with the samples of the batch"),
        (lambda seen, x: seen + (x.sum() - seen) / 8, "adds a sum over the samples to a value"),
        pytest.param(lambda seen, x: seen + x.sum(), "", marks=pytest.mark.full),
        (lambda seen, x: seen - (x**2).sum(), ""),
        pytest.param(lambda seen, x: 0.9 * seen + 0.1 * x.mean(), "", marks=pytest.mark.full),
        (lambda seen, x: seen + (x.mean() - seen) / 8, ""),
    ],
)
def test_only_a_sum_in_floating_point_is_changed_in_turn(change, words):
    class Watching(Counting):
        def __init__(self):
            super().__init__()
            self.seen = Seen(jnp.zeros(()))

    def loss(model, batch):
        model.seen[...] = change(model.seen[...], batch["x"])
        return jnp.mean(model.layer(batch["x"]) ** 2)

    def build(**options):
        batch, world = {"x": np.ones((8, 4), np.float32)}, World.emulate(2)
        build_train_step(
            Watching, optax.sgd(0.1), loss, ddp(), world, accumulate=2, batch=batch, **options
        )

    if not words:
        build()
        return
    with pytest.raises(UnsupportedError, match=f"buffer 'seen' .*{words}.*would change it in turn"):
        build()
    build(separable=False)


class Normed(nnx.Module):
    """Centres its samples by their mean, or by the mean that it has seen."""

    def __init__(self, own=False):
        self.layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.own, self.mean = own, nnx.BatchStat(jnp.zeros(4))

    def __call__(self, x):
        seen, mean = self.mean[...], x.mean(0)
        self.mean[...] = 0.9 * seen + 0.1 * mean
        return self.layer(x - (mean if self.own else seen))


OF_SAMPLES = {
    "pairs": (lambda y: jnp.mean(jax.nn.logsumexp(y @ y.T, -1)), "multiplies every sample with ev"),
    "hardest": (lambda y: jax.lax.top_k(y[:, 0], 2)[0].mean(), "along the samples"),
    "turned": (lambda y: jnp.mean((y - y[::-1]) ** 2), "reverses the order"),
    "mean": (lambda y: jnp.mean(y**2), ""),
}


@pytest.mark.parametrize("name", OF_SAMPLES)
def test_statistics_excuse_no_loss_that_compares_samples(name, recwarn):
    loss, words = OF_SAMPLES[name]

    def build(own):
        batch, loss_fn = {"x": np.ones((8, 4), np.float32)}, lambda m, b: loss(m(b["x"]))
        make, world = lambda: Normed(own), World.emulate(2)
        return build_train_step(
            make, optax.sgd(0.1), loss_fn, ddp(), world, accumulate=2, batch=batch
        )

    if words:
        with pytest.raises(UnsupportedError, match=rf"the loss .*{words}.*\(test_separable.py:"):
            build(own=False)
        return
    build(own=False)
    assert not recwarn.list
    build(own=True)
    told = str(recwarn.pop(UserWarning).message)
    assert "the module with the statistic 'mean' (test_separable.py:" in told
    # The module has no such argument; the advice is to do what `own=False` does.
    assert "use_running_average" not in told
    assert "normalise by the statistics that the last step left" in told


@pytest.mark.parametrize("strategy", [ddp(), ddp(bucket_capacity=64)], ids=["ddp", "buckets"])
def test_a_loss_of_sums_is_not_blamed_for_a_metric(strategy):
    case = CASES["mlp"]

    def loss_fn(model, batch):
        squares = (model(batch["x"]) - batch["y"]) ** 2
        return jnp.sqrt(jnp.mean(squares)), {"spread": jnp.std(squares[:, 0])}

    with pytest.raises(UnsupportedError, match=r"the metric 'spread' .*\(test_separable.py:"):
        separation(split_in(2, loss_fn, strategy=strategy), case.batch(0))


class Average(nnx.Variable):
    """A statistic of the batch that no layer of Flax knows."""


class Averaging(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones(4))
        self.average = Average(jnp.zeros(4))

    def __call__(self, x):
        self.average[...] = 0.9 * self.average[...] + 0.1 * x.mean(0)
        return x @ self.kernel[...]


def averaged(strategy, **options):
    loss_fn = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    world = World.emulate(2, "dp=2")
    step = build_train_step(Averaging, optax.sgd(0.1), loss_fn, strategy, world, **options)
    state, _ = step(step.init(), {"x": jnp.arange(32.0).reshape(8, 4)})
    return [np.asarray(shard.data) for shard in state.buffers["average"].addressable_shards]


def test_separable_true_lets_no_buffer_differ_between_the_ranks():
    with pytest.raises(
        UnsupportedError, match=r"'average' changes with the samples.*each rank"
    ) as e:
        averaged(ddp(bucket_capacity=100), separable=True)
    assert e.value.code == "buffer-of-one-rank"
    for shard in averaged(ddp(), separable=True):
        np.testing.assert_allclose(shard, [1.4, 1.5, 1.6, 1.7], rtol=1e-6)
    # Leaving out one of the two that it names is not enough.
    with pytest.raises(UnsupportedError, match="separable=True and bucket_capacity=100 out; or"):
        averaged(ddp(bucket_capacity=100), separable=True)
    with pytest.raises(UnsupportedError, match=r"'average' .*leave bucket_capacity=100 out"):
        averaged(ddp(bucket_capacity=100))
    own = averaged(ddp(bucket_capacity=100, broadcast_buffers=False), separable=True)
    np.testing.assert_allclose(own[1] - own[0], np.full((1, 4), 1.6), rtol=1e-6)


NUM_CLASSES = 5


def cross_entropy(model, batch):
    """Each sample's."""
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"][:, 0])


def weighted_by_frequency(model, batch):
    """Looks up the frequencies of the batch's labels row by row."""
    count = len(batch["y"])
    frequency = jnp.zeros(NUM_CLASSES).at[batch["y"][:, 0]].add(1 / count)
    weights = jax.lax.map(lambda labels: frequency[labels].mean(), batch["y"])
    return jnp.mean(weights * cross_entropy(model, batch))


def with_entropy_of_labels(model, batch):
    """Writes labels into zeros, and takes the entropy of their frequencies."""
    count = len(batch["y"])
    hot = jnp.zeros((count, NUM_CLASSES)).at[jnp.arange(count), batch["y"][:, 0]].set(1.0)
    frequency = hot.mean(0)
    scale = -jnp.sum(frequency * jnp.log(frequency + 1e-6))
    return jnp.mean(cross_entropy(model, batch)) * scale


def of_copies(model, batch):
    """Has features twice."""
    x = jnp.tile(batch["x"][:, :3], (1, 2))
    return jnp.mean(cross_entropy(model, {**batch, "x": x}))


def of_copies_in_a_loop(model, batch):
    """Has the scores of a sample twice, and divides them by the number of samples."""
    count = len(batch["x"])

    def of_one(sample):
        scores = jnp.tile(model(sample["x"]) / count, 2)
        return scores[sample["y"][:1]].sum()

    return jnp.sum(jax.lax.map(of_one, batch))


OF_ONE_DEVICE = {
    "weighted by frequency": (weighted_by_frequency, "looks up a total over the samples"),
    "entropy of labels": (with_entropy_of_labels, "takes `log` of a total"),
    "copies": (of_copies, ""),
    "copies in a loop": (of_copies_in_a_loop, ""),
}


@pytest.mark.parametrize("name", OF_ONE_DEVICE)
def test_microbatches_train_as_one_device_or_are_refused(name):
    loss_fn, why = OF_ONE_DEVICE[name]
    random = np.random.default_rng(0)
    labels = np.sort(random.integers(0, NUM_CLASSES, (16, 2)), 0).astype(np.int32)
    batch = {"x": random.normal(size=(16, 6)).astype(np.float32), "y": labels}
    model = drawn(lambda: nnx.Linear(6, NUM_CLASSES, rngs=nnx.Rngs(0)))

    def trained():
        world = World.emulate(2, "dp=2")
        step = build_train_step(
            model, optax.sgd(1.0), loss_fn, ddp(), world, accumulate=2, batch=batch
        )
        return step(step.init(), batch)

    if why:
        with pytest.raises(UnsupportedError, match=why):
            trained()
        return
    state, metrics = trained()
    graph, params = nnx.split(model)
    alone = jax.jit(jax.value_and_grad(lambda p: loss_fn(nnx.merge(graph, p), batch)))
    loss, grads = alone(params)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-4)
    for key in ("kernel", "bias"):
        want = np.asarray(params[key][...] - grads[key][...])
        np.testing.assert_allclose(state.params[key], want, rtol=1e-4, atol=1e-5)
