"""The user chooses what is trained; the rest has the same layout, without gradients or moments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import (
    Reduction,
    World,
    build_train_step,
    compose,
    ddp,
    fsdp,
    load_checkpoint,
    lora,
    pipelined,
    save_checkpoint,
    tensor_parallel,
    zero,
)
from axon_dist.core.errors import ConfigError, UnsupportedError
from axon_dist.inspect import collectives
from axon_dist.step import PortableForm
from axon_dist.step.model_spec import trainable_filter
from tests.one_device import trained

WIDTH, DEPTH, RANK = 32, 4, 2
SOME = ("blocks/.*/up/(kernel|bias)", "head")


class Block(nnx.Module):
    def __init__(self, hidden, rngs):
        self.up = nnx.Linear(WIDTH, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Net(nnx.Module):
    def __init__(self, rngs, widths=(2 * WIDTH,) * DEPTH):
        self.embed = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for width in widths])
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 8, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make():
    """Adapters that are no longer what they started as, so that both of their sides learn."""
    model = lora(Net(nnx.Rngs(0)), RANK, "blocks", rngs=nnx.Rngs(1))
    for number, (_, variable) in enumerate(nnx.iter_graph(model)):
        if isinstance(variable, nnx.LoRAParam):
            wave = 0.3 * np.sin((1 + number) * np.arange(variable.size, dtype=np.float32))
            variable[...] = jnp.asarray(wave.reshape(variable.shape), jnp.float32)
    return model


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


RANDOM = np.random.default_rng(0)
BATCHES = [
    {
        "x": RANDOM.normal(size=(16, WIDTH)).astype(np.float32),
        "y": RANDOM.normal(size=(16, 8)).astype(np.float32),
    }
    for _ in range(3)
]


def as_bf16(model, wrt):
    """The model with what is not trained in bfloat16."""
    chosen = nnx.state(model, nnx.All(nnx.Param, nnx.Not(wrt)))
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), chosen))
    return model


@functools.cache
def on_one_device(trainable, narrow=False, decay=0.5, optimizer=None):
    """Plain Flax and optax: losses, the model, and the model of the averaged parameters."""
    wrt = trainable_filter(trainable)
    model = as_bf16(make(), wrt) if narrow else make()
    numbers = lambda: jax.tree.map(np.array, nnx.state(model, wrt))
    ema = numbers()

    def batches():
        """Between steps, the average takes in what the step before has made."""
        nonlocal ema
        for number, batch in enumerate(BATCHES):
            if number:
                ema = average(ema)
            yield batch

    average = lambda ema: jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, ema, numbers())
    losses = trained(model, optimizer or optax.sgd(0.1), loss_fn, batches(), wrt)
    ema = average(ema)
    averaged = nnx.clone(model)
    nnx.update(averaged, ema)
    return losses, model, averaged


def params(model):
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]


def assert_same(got, want, **bounds):
    for one, other in zip(params(got), params(want), strict=True):
        np.testing.assert_allclose(one, other, **({"rtol": 1e-5, "atol": 1e-6} | bounds))


SMALL = {"min_elements": 8}
ROWS = {
    "fsdp": ("fsdp=8", lambda: fsdp(**SMALL), nnx.LoRAParam, {}),
    "by hand": ("fsdp=4", lambda: fsdp(**SMALL, reduction=Reduction(manual=True)), SOME, {}),
    "buckets": ("dp=4", lambda: ddp(bucket_capacity=1000), SOME, {"accumulate": 2}),
    "pp": ("pp=2,dp=2", lambda: compose(pipelined(2, 4), ddp()), nnx.LoRAParam, {}),
    "tp": ("tp=4", lambda: tensor_parallel({"up": "column", "down": "row"}), nnx.LoRAParam, {}),
}
MORE = {
    "per step": (
        "fsdp=4",
        lambda: fsdp(**SMALL, reduction=Reduction(per="step")),
        nnx.LoRAParam,
        {"accumulate": 2},
    ),
    "pp kept": (
        "pp=2",
        lambda: pipelined(2, 4, "zero_bubble_h1", backward="residuals"),
        SOME,
        {},
    ),
    "pp head": ("pp=2", lambda: pipelined(2, 2), "head", {}),
    "fsdp paths": ("fsdp=4", lambda: fsdp(**SMALL), SOME, {}),
    "zero1": ("dp=8", lambda: zero(1, **SMALL), SOME, {}),
    "hybrid": ("dp=2,fsdp=4", lambda: fsdp("hybrid_shard", ("dp", "fsdp"), **SMALL), SOME, {}),
    "pp fsdp": ("pp=2,fsdp=2", lambda: compose(pipelined(2, 4), fsdp(**SMALL)), SOME, {}),
    "pp chunks": ("pp=2", lambda: pipelined(2, 4, "interleaved_1f1b"), nnx.LoRAParam, {}),
}
CELLS = [pytest.param(row, id=name) for name, row in ROWS.items()] + [
    pytest.param(row, id=name, marks=pytest.mark.full) for name, row in MORE.items()
]


@pytest.mark.full
@pytest.mark.sample("by hand")
@pytest.mark.parametrize("row", CELLS)
def test_equals_an_optimizer_of_the_chosen_variables_on_one_device(row, make_world):
    axes, strategy, trainable, options = row
    want, model, averaged = on_one_device(trainable)
    step = build_train_step(
        make, optax.sgd(0.1), loss_fn, strategy(), make_world(axes),
        trainable=trainable, ema=0.5, batch=BATCHES[0], **options,
    )  # fmt: skip
    state, got = step.init(), []
    for batch in BATCHES:
        state, metrics = step(state, batch)
        got.append(float(metrics["loss"]))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same(step.merge(state), model)
    assert_same(step.merge(state, ema=True), averaged)
    loss = step.evaluate(state, BATCHES[0], ema=True)["loss"]
    np.testing.assert_allclose(loss, loss_fn(averaged, BATCHES[0]), rtol=1e-5)


@pytest.mark.full
def test_norms_clipping_and_checks_know_trained_parameters_alone(make_world):
    """`optax` on one device clips by the norm of what it is given, and so does the step."""
    clipped = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2))
    wrt = trainable_filter(nnx.LoRAParam)
    model = make()
    grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model, BATCHES[0])
    _, after, _ = on_one_device(nnx.LoRAParam, optimizer=clipped)
    step = build_train_step(
        make, optax.adam(1e-2), loss_fn, fsdp(**SMALL), make_world("fsdp=4"), clip_norm=0.05,
        metrics=("loss", "grad_norm", "param_norm"), trainable=nnx.LoRAParam, nonfinite="skip",
    )  # fmt: skip
    state, metrics = step(step.init(), BATCHES[0])
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
    np.testing.assert_allclose(metrics["param_norm"], optax.tree.norm(state.params), rtol=1e-5)
    for batch in BATCHES[1:]:
        state, _ = step(state, batch)
    # Adam divides by gradients near zero.
    assert_same(step.merge(state), after, atol=2e-5)
    assert {x.shape for x in jax.tree.leaves(state.opt_state)} <= {
        (), *(x.shape for x in jax.tree.leaves(state.params)),
    }  # fmt: skip


def wide():
    """Adapters of rank 2, and kernels so large that all else is small."""
    return lora(Net(nnx.Rngs(0), (4 * WIDTH,) * 4), RANK, "blocks", rngs=nnx.Rngs(1))


@pytest.mark.full
def test_a_frozen_base_is_gathered_twice_and_holds_2p_over_n(make_world):
    """Two gathers of the base and no reduction; two bytes per parameter, and no moments.

    The dtype of the gathers is bfloat16 on a GPU, which is tested for h100; XLA:CPU widens in front
    of them.
    """
    world = make_world("fsdp=8")
    build = functools.partial(
        build_train_step, wide, optax.adam(1e-2), loss_fn, fsdp(**SMALL), world
    )
    # In a loop: written out, the first block does not gather again what only those before it need.
    step = build(trainable=nnx.LoRAParam, frozen_dtype="bfloat16", unroll=1)
    ledger = collectives(step.lower(BATCHES[0]).compile(), world.mesh)
    paths = dict(nnx.to_flat_state(nnx.state(wide(), nnx.Param)))
    size = lambda chosen: sum(v[...].size for keys, v in paths.items() if chosen(keys))
    blocks = size(lambda keys: keys[0] == "blocks" and "lora" not in keys)
    outside = size(lambda keys: keys[0] != "blocks")
    adapters = size(lambda keys: "lora" in keys)
    # What is outside the units is gathered once.
    gathered = 4 * (2 * blocks + outside + 2 * adapters)
    assert ledger.total_wire_bytes("all-gather") == pytest.approx(gathered * 7 / 8, rel=0.005)
    # XLA:CPU spells a reduce-scatter as an all-reduce, of twice the bytes.
    reduced = ledger.total_wire_bytes("all-reduce") / 2 + ledger.total_wire_bytes("reduce-scatter")
    assert reduced == pytest.approx(4 * adapters * 7 / 8, rel=0.05)
    state = step.init()
    own = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
    assert own(state.frozen) == pytest.approx(2 * (blocks + outside) / 8, rel=0.01)
    assert own((state.params, state.opt_state)) == pytest.approx(12 * adapters / 8, rel=0.01)
    full = build()
    whole = collectives(full.lower(BATCHES[0]).compile(), world.mesh).total_wire_bytes()
    # What is spared is the reduction of the base.
    spared = 8 * (blocks + outside) * 7 / 8
    assert whole - ledger.total_wire_bytes() == pytest.approx(spared, rel=0.01)


@pytest.mark.full
def test_a_frozen_bfloat16_base_under_fsdp_equals_one_device(make_world):
    want, model, _ = on_one_device(nnx.LoRAParam, narrow=True)
    step = build_train_step(
        make, optax.sgd(0.1), loss_fn, fsdp(**SMALL), make_world("fsdp=8"),
        trainable=nnx.LoRAParam, frozen_dtype="bfloat16",
    )  # fmt: skip
    state, got = step.init(), []
    for batch in BATCHES:
        state, metrics = step(state, batch)
        got.append(float(metrics["loss"]))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same(step.merge(state), model)
    assert {x.dtype for x in jax.tree.leaves(state.frozen)} == {jnp.dtype("bfloat16")}


@pytest.mark.full
def test_a_run_goes_on_in_another_strategy(make_world, tmp_path):
    """Frozen parameters and the average are saved with the rest, and taken up by any strategy."""
    _, model, averaged = on_one_device(SOME)
    build = lambda strategy, axes: build_train_step(
        make, optax.sgd(0.1), loss_fn, strategy, make_world(axes), trainable=SOME, ema=0.5
    )
    first = build(compose(pipelined(2, 4), ddp()), "pp=2,dp=2")
    state, _ = first(first.init(), BATCHES[0])
    save_checkpoint(tmp_path, PortableForm(first).to_canonical(state))
    second = build(fsdp(**SMALL), "fsdp=4")
    form = PortableForm(second)
    # What is loaded replaces what the factory has made, in every array.
    state = form.from_canonical(load_checkpoint(tmp_path, form.target))
    for batch in BATCHES[1:]:
        state, _ = second(state, batch)
    assert_same(second.merge(state), model)
    assert_same(second.merge(state, ema=True), averaged)


@pytest.mark.full
def test_a_skipped_update_leaves_the_average_as_it_was(make_world):
    step = build_train_step(
        make, optax.sgd(0.1), loss_fn, ddp(), make_world("dp=2"), ema=0.5, nonfinite="skip"
    )
    state = step.init()
    before = jax.device_get(state.ema)
    broken = {**BATCHES[0], "x": np.full_like(BATCHES[0]["x"], np.inf)}
    state, metrics = step(state, broken)
    assert bool(metrics["nonfinite"])
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.ema))


def test_the_average_of_half_precision_is_wide(make_world):
    """In bfloat16 an average would never move."""
    step = build_train_step(
        lambda: nnx.Linear(WIDTH, 8, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)),
        optax.sgd(0.1), loss_fn, ddp(), make_world("dp=2"), ema=0.999,
    )  # fmt: skip
    state = step.init()
    assert {x.dtype for x in jax.tree.leaves(state.ema)} == {jnp.dtype("float32")}
    assert step.merge(state, ema=True).kernel[...].dtype == jnp.bfloat16


class Scale(nnx.Variable):
    """A kind of its own."""


class Scaled(nnx.Module):
    def __init__(self):
        self.scale = Scale(jnp.ones((8,)))
        self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
        self.linear = nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(self.linear(x)) * self.scale[...]


def test_a_variable_of_ones_own_kind_can_be_trained(make_world):
    step = build_train_step(
        Scaled, optax.sgd(0.1), loss_fn, fsdp(**SMALL), make_world("fsdp=4"), trainable=Scale
    )
    model = Scaled()
    grads = nnx.jit(nnx.grad(loss_fn, argnums=nnx.DiffState(0, Scale)))(model, BATCHES[0])
    state, _ = step(step.init(), BATCHES[0])
    want = model.scale[...] - 0.1 * grads["scale"][...]
    np.testing.assert_allclose(state.params["scale"], want, rtol=1e-5)
    assert state.frozen["linear"]["kernel"].sharding.spec == jax.P("fsdp")


class Table(nnx.Variable):
    """A variable that the model reads, and nobody trains."""


class Count(nnx.Variable):
    """A variable that the model changes itself."""


class Reading(nnx.Module):
    def __init__(self):
        self.table = Table(jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)))
        self.count = Count(jnp.zeros((WIDTH,)))
        self.linear = nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        self.count[...] += 1
        return self.linear(jnp.tanh(x @ self.table[...])) * self.count[...][:8]


def test_other_variables_are_divided_as_parameters_are(make_world):
    """Between steps no device holds all of one; what the model changes is what it made of it."""
    world = make_world("fsdp=4")
    step = build_train_step(Reading, optax.sgd(0.01), loss_fn, fsdp(**SMALL), world)
    model, state = Reading(), step.init()
    losses = trained(model, optax.sgd(0.01), loss_fn, BATCHES)
    for batch, loss in zip(BATCHES, losses, strict=True):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert state.buffers["table"].sharding.spec == jax.P("fsdp")
    assert state.buffers["count"].sharding.spec == jax.P("fsdp")
    np.testing.assert_array_equal(step.merge(state).count[...], 3)
    assert_same(step.merge(state), model)


@pytest.mark.parametrize(
    ("trainable", "text"),
    [
        ("tail", r"trainable='tail' finds nothing in the model, which has Variables of the types "),
        (("head", "tail"), r"trainable='tail' finds nothing .* at the paths blocks/0/down/bias"),
        (nnx.Cache, r"trainable=nnx.Cache finds nothing in the model"),
        ("(", r"trainable='\(' is not a regular expression: .* such as 'blocks/\.\*/kernel'"),
        (3, r"trainable=3; give a type of Variable such as nnx.LoRAParam, a regular expression"),
        (nnx.Linear, r"trainable=<class .*Linear'>; give a type of Variable"),
        (nnx.PathContains("drop"), r"takes in 'drop/rngs/count', an nnx.RngCount that the forward"),
        (nnx.RngCount, r"an nnx.RngCount that .*; name a type of parameter, such as nnx.Param"),
    ],
)
def test_a_choice_that_cannot_be_trained_is_refused(trainable, text, world):
    with pytest.raises(ConfigError, match=text):
        build_train_step(make, optax.sgd(0.1), loss_fn, ddp(), world, trainable=trainable)


def test_a_dtype_of_nothing_frozen_is_refused(world):
    build = functools.partial(build_train_step, make, optax.sgd(0.1), loss_fn, ddp(), world)
    with pytest.raises(ConfigError, match=r"'bfloat16', but the model has no frozen parameters"):
        build(frozen_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"frozen dtype is 'int4'; it must be a floating-point"):
        build(frozen_dtype="int4", trainable="head")


@pytest.mark.parametrize("decay", [1.0, -0.1])
def test_a_decay_that_is_none_is_refused(decay, world):
    with pytest.raises(ConfigError, match=rf"ema is {decay}; it must be the decay of the average"):
        build_train_step(make, optax.sgd(0.1), loss_fn, ddp(), world, ema=decay)


@pytest.mark.full
def test_an_average_that_is_not_kept_is_refused(make_world):
    step = build_train_step(make, optax.sgd(0.1), loss_fn, ddp(), make_world("dp=2"))
    with pytest.raises(ConfigError, match=r"the state has no moving average .* ema=0.999"):
        step.merge(step.init(), ema=True)


@pytest.mark.full
@pytest.mark.sample("vectors")
@pytest.mark.parametrize("widths", [(16, 16, 16, 16), (16, 16, 8, 8)], ids=["rows", "vectors"])
def test_a_pipeline_trains_some_blocks_and_freezes_others(widths, make_world):
    """One rank trains its part of a row or of a vector, and another does not."""

    def net():
        return Net(nnx.Rngs(0), widths)

    chosen, clipped = "blocks/[02]/", optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5))
    wrt, model = trainable_filter(chosen), net()
    trained(model, clipped, loss_fn, BATCHES[:2], wrt)
    step = build_train_step(
        net, clipped, loss_fn, pipelined(2, 4), make_world("pp=2"), trainable=chosen,
        batch=BATCHES[0],
    )  # fmt: skip
    state = step.init()
    for batch in BATCHES[:2]:
        state, _ = step(state, batch)
    assert_same(step.merge(state), model)


class Average(nnx.Variable):
    """A variable that the loss itself changes."""


class Student(nnx.Module):
    def __init__(self, kind):
        self.student = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.norm = nnx.WeightNorm(nnx.Linear(4, 4, rngs=nnx.Rngs(1)), rngs=nnx.Rngs(2))
        self.teacher = kind(nnx.initializers.ones(jax.random.key(3), (4, 4)))


def follow(model, batch):
    """The teacher is a mean of the student's weights over the steps."""
    target = jax.lax.stop_gradient(batch["x"] @ model.teacher[...])
    # Checkpoints and norms hand parameters on as other arrays, and change none for good.
    hidden = nnx.remat(lambda layer, x: layer(x))(model.student, batch["x"])
    loss = jnp.mean((model.norm(hidden) - target) ** 2)
    kernel = jax.lax.stop_gradient(model.student.kernel[...])
    model.teacher[...] = 0.9 * model.teacher[...] + 0.1 * kernel
    return loss


@pytest.mark.full
def test_a_parameter_that_the_loss_changes_is_refused_and_a_variable_is_kept():
    world, batch = World.emulate(2, "dp=2"), {"x": np.ones((4, 4), np.float32)}
    with pytest.raises(UnsupportedError, match=r"changes the parameter 'teacher'.*Average\("):
        build_train_step(Student(nnx.Param), optax.sgd(0.1), follow, ddp(), world, batch=batch)
    step = build_train_step(Student(Average), optax.sgd(0.1), follow, ddp(), world, batch=batch)
    state = step.init()
    kernel = np.asarray(step.merge(state).student.kernel[...])
    after = step.merge(step(state, batch)[0])
    np.testing.assert_allclose(after.teacher[...], 0.9 + 0.1 * kernel, rtol=1e-6)


class Critic(nnx.Module):
    """Two blocks with a layer that a norm wraps."""

    class Normed(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(4, 4, rngs=rngs)
            self.norm = nnx.SpectralNorm(self.layer, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.norm(x))

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([self.Normed(rngs), self.Normed(rngs)])


def build_critic(also, make=Critic):
    def loss_fn(model, batch):
        x = model.blocks[1](model.blocks[0](batch["x"]))
        return jnp.mean(x**2) + also(model.blocks[0], x)

    world, batch = World.emulate(2, "fsdp=2"), {"x": np.ones((4, 4), np.float32)}
    return build_train_step(make, optax.sgd(0.1), loss_fn, fsdp(min_elements=1), world, batch=batch)


@pytest.mark.parametrize(
    "also",
    [
        lambda block, x: 0.0,
        lambda block, x: jnp.mean(block.layer.bias[...] ** 2),
        # Two parts of the batch do not divide into groups of four.
        lambda block, x: jnp.mean(x.reshape(-1, 4, 4).std(1)),
    ],
    ids=["nothing", "what no norm changes", "groups"],
)
def test_a_normalised_weight_may_be_read_in_its_block(also):
    build_critic(also)


def test_blocks_that_are_norms_are_accepted():
    """The class of the layer that a norm wraps is that of another block, too."""

    def make():
        rngs = nnx.Rngs(0)
        layers = [nnx.Linear(4, 4, rngs=rngs) for _ in range(2)]
        return nnx.Sequential(nnx.SpectralNorm(layers[0], rngs=rngs), layers[1])

    loss_fn = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    world, batch = World.emulate(2, "fsdp=2"), {"x": np.ones((4, 4), np.float32)}
    build_train_step(make, optax.sgd(0.1), loss_fn, fsdp(min_elements=1), world, batch=batch)


def test_a_normalised_weight_that_is_read_outside_its_block_is_refused():
    with pytest.raises(UnsupportedError, match="'blocks/0/layer/kernel' is normalised") as raised:
        build_critic(lambda block, x: jnp.mean(block.layer(x) ** 2))
    assert raised.value.code == "normed-weight-read-outside-block"

    class Reader(nnx.Module):
        def __init__(self, layer):
            self.layer = layer

        def __call__(self, x):
            return self.layer(x)

    class Shared(Critic):
        def __init__(self):
            super().__init__()
            self.blocks = nnx.List([self.blocks[0], Reader(self.blocks[0].layer)])

    with pytest.raises(UnsupportedError, match="'blocks/0/layer/kernel' is normalised by"):
        build_critic(lambda block, x: 0.0, Shared)


class Twins(nnx.Module):
    def __init__(self):
        student, teacher = ([Block(WIDTH, nnx.Rngs(n + i)) for n in range(2)] for i in (0, 5))
        self.student, self.teacher = nnx.List(student), nnx.List(teacher)


def drift(model, batch):
    """How far the trained twin is from the frozen one, in weights as in results."""
    twins = model.student, model.teacher
    weights = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), *(nnx.state(t) for t in twins))
    student, teacher = (twin[1](twin[0](batch["x"])) for twin in twins)
    return jnp.mean((student - teacher) ** 2) + sum(jax.tree.leaves(weights))


@pytest.mark.full
def test_states_of_a_trained_and_a_frozen_twin_map_onto_each_other(make_world):
    strategy, world = fsdp(min_elements=1), make_world("fsdp=2")
    step = build_train_step(Twins(), optax.sgd(0.1), drift, strategy, world, trainable="student")
    batch = {"x": BATCHES[0]["x"]}
    state, metrics = step(step.init(), batch)
    twins = Twins()
    loss, grads = nnx.jit(nnx.value_and_grad(drift))(twins, batch)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    expected = twins.student[1].up.kernel[...] - 0.1 * grads.student[1].up.kernel[...]
    found = step.merge(state)
    np.testing.assert_allclose(found.student[1].up.kernel[...], expected, rtol=1e-5, atol=1e-6)
    kept = twins.teacher[1].up.kernel[...]
    np.testing.assert_array_equal(found.teacher[1].up.kernel[...], kept)
