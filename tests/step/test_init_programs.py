"""The first state, made in parts: the bits of one program, few programs, and no leaf whole."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from axon_dist import World
from axon_dist.core.tree import is_key, leaves_with_paths
from axon_dist.models import Transformer, TransformerConfig
from axon_dist.parallel import compose, ddp, fsdp, pipelined, tensor_parallel
from axon_dist.step import build_train_step, layout
from axon_dist.step.init_programs import InSlices
from tests.drawn import drawn

SIZES = {"width": 32, "num_layers": 2, "num_heads": 4, "ffn_width": 64, "max_length": 16}


def loss_fn(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


def transformer(**changes):
    config = TransformerConfig(**{**SIZES, **changes})
    return lambda: Transformer(config, rngs=nnx.Rngs(0))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.LayerNorm()(nn.relu(nn.Dense(16)(x))))


def linen():
    return nnx.bridge.ToNNX(Linen(), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 8)))


class Custom(nnx.Module):
    """Initializers of many kinds, of which some results come from one computation."""

    def __init__(self, rngs):
        self.square = nnx.Linear(
            8, 8, kernel_init=nnx.initializers.orthogonal(), use_bias=False, rngs=rngs
        )
        whole = jax.random.normal(rngs.params(), (64, 64)) / 8
        self.left, self.right = nnx.Param(whole[:, :32]), nnx.Param(whole[:, 32:])
        low, high = jax.jit(lambda key: jax.random.split(key))(rngs.params())
        self.low = nnx.Param(jax.random.uniform(low, (8, 8), minval=-0.5))
        self.high = nnx.Param(jax.random.truncated_normal(high, -2, 2, (8, 8)))
        self.table = nnx.Param(jnp.sin(jnp.arange(64.0).reshape(8, 8)))
        self.given = nnx.Param(jnp.asarray(np.linspace(0, 1, 8, dtype=np.float32)))
        self.scale = nnx.Param(jnp.asarray(0.5))
        self.seen = nnx.BatchStat(jax.random.randint(rngs.params(), (3,), 0, 9))
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.dropout(self.square(x) @ self.low.get_value()))


class Stacked(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,))
        def layers(rngs):
            return nnx.Linear(16, 16, rngs=rngs)

        self.layers = layers(rngs)

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.layers
        )


class Tower(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(4)])
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.head(x)


class Recorded(InSlices):
    """Keeps what was made, so that tests can look at its programs."""

    made: list[InSlices] = []  # noqa: RUF012

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.made.append(self)


@pytest.fixture
def recorded(monkeypatch):
    """The programs of the first states that a test makes: of parameters, then of the rest."""
    monkeypatch.setattr(Recorded, "made", [])
    monkeypatch.setattr(layout, "InSlices", Recorded)
    return Recorded.made


def bits(tree):
    return {
        path: np.asarray(jax.random.key_data(x) if is_key(x) else x)
        for path, x in leaves_with_paths(tree)
    }


def step_of(make, world, strategy, **options):
    return build_train_step(make, optax.adamw(1e-3), loss_fn, strategy, world, **options)


def check_bits(step):
    """Compares a first state with the one of two whole programs."""
    state = step.init()
    stored, buffers = step.state_layout._factory({})
    whole = jax.jit(step.state_layout.state_from, out_shardings=step.state_shardings)(
        stored, buffers
    )
    mine, theirs = bits(state), bits(whole)
    assert mine.keys() == theirs.keys()
    for path, want in theirs.items():
        assert mine[path].dtype == want.dtype, path
        assert mine[path].tobytes() == want.tobytes(), path
    for mine, want in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        assert mine.sharding == want.sharding
        assert jax.typeof(mine) == jax.typeof(want)
    # No two arrays of a state share memory, which its step gives away.
    pointers = [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(state)
        if not is_key(leaf)
        for shard in leaf.addressable_shards
    ]
    assert len({*pointers}) == len(pointers)


MODELS = {
    "transformer": transformer(),
    "tied, with dropout": transformer(tied_head=True, dropout=0.1),
    "layers in one array": transformer(scan_layers=True),
    "linen": linen,
    "custom": lambda: Custom(nnx.Rngs(0, dropout=1)),
    "stacked": lambda: Stacked(nnx.Rngs(0)),
}

TENSOR = tensor_parallel("transformer")
STRATEGIES = {
    "ddp": ("dp=8", ddp()),
    "fsdp": ("fsdp=8", fsdp(min_elements=1)),
}


@pytest.mark.sample("stacked-ddp", "linen-fsdp")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", MODELS)
def test_the_bits_are_those_of_one_program(model, strategy):
    mesh, way = STRATEGIES[strategy]
    check_bits(step_of(MODELS[model], World.emulate(8, mesh), way))


@pytest.mark.sample("pp=2,dp=4-strategy0-<lambda>-options0")
@pytest.mark.parametrize(
    ("mesh", "strategy", "make", "options"),
    [
        ("pp=2,dp=4", compose(pipelined(2, 4), ddp()), lambda: Tower(nnx.Rngs(0)), {}),
        ("dp=2,fsdp=4", fsdp("hybrid_shard", ("dp", "fsdp")), transformer(), {"ema": 0.9}),
        ("dp=2,tp=4", compose(ddp(), tensor_parallel("transformer")), transformer(), {}),
        (
            "fsdp=2,tp=4",
            compose(fsdp(min_elements=1), tensor_parallel("transformer")),
            transformer(),
            {},
        ),
        (
            "fsdp=8",
            fsdp(min_elements=1),
            transformer(),
            {"precision": "bf16", "trainable": "head|norm", "frozen_dtype": "bfloat16"},
        ),
        (
            "fsdp=8",
            fsdp(min_elements=1, cpu_offload="optimizer"),
            transformer(num_layers=1, gated=False),
            {},
        ),
    ],
)
def test_the_bits_of_other_states(mesh, strategy, make, options):
    check_bits(step_of(make, World.emulate(8, mesh), strategy, **options))


@pytest.mark.sample("dp=2,fsdp=4-strategy1-f32[256,256]")
@pytest.mark.parametrize(
    ("mesh", "strategy", "share"),
    [
        ("dp=8", ddp(), "f32[64,1024]"),
        ("dp=2,fsdp=4", fsdp("hybrid_shard", ("dp", "fsdp")), "f32[256,256]"),
    ],
)
def test_devices_that_hold_the_same_share_in_drawing_it(recorded, mesh, strategy, share):
    """A large array has the same bits, and each device draws an eighth of it."""
    step = step_of(
        lambda: nnx.Linear(512, 1024, rngs=nnx.Rngs(0)), World.emulate(8, mesh), strategy
    )
    check_bits(step)
    kernel = max(
        recorded[0].programs, key=lambda one: np.prod(one.program_slice.program.out_avals[0].shape)
    )
    text = kernel.run.lower(np.zeros(2, np.uint32)).compile().as_text()
    assert "all-gather" in text
    assert share in text


@pytest.mark.full
def test_twelve_layers_share_their_programs(recorded):
    """A block has four kernels of attention, three of its feed-forward, two scales, two norms."""
    step = step_of(transformer(num_layers=12), World.emulate(8, "fsdp=8"), fsdp(min_elements=1))
    step.init()
    drawn, rest = recorded
    counts = [one.count for one in drawn.programs]
    assert sum(counts) == 12 * 7 + 2
    assert len(counts) == 6
    # Moments are constants, which the host writes on CPUs.
    assert not rest.programs


def test_no_leaf_is_whole_on_a_device(recorded):
    """Each of eight devices needs the memory of its eighth."""
    make = transformer(num_layers=1)
    step = step_of(make, World.emulate(8, "fsdp=8"), fsdp(min_elements=1))
    step.init()
    for program in recorded[0].programs:
        (place,) = program.out_shardings
        (result,) = program.program_slice.program.jaxpr.outvars
        shape = result.aval.shape
        assert place.spec != PartitionSpec()
        share = 4 * int(np.prod(place.shard_shape(shape)))
        compiled = program.run.lower(np.zeros(2, np.uint32)).compile()
        (output,) = compiled.output_shardings
        assert output.shard_shape(shape) == place.shard_shape(shape)
        used = compiled.memory_analysis()
        assert used.output_size_in_bytes <= share
        assert used.temp_size_in_bytes <= 3 * share + 1024


def test_an_initializer_that_does_more_than_draw_stays_one_program(recorded):
    def make():
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        jax.debug.callback(lambda x: None, model.bias[...])
        return model

    step = step_of(make, World.emulate(8, "dp=8"), ddp())
    check_bits(step)
    assert not recorded[0].programs


@pytest.mark.parametrize(("mesh", "strategy"), [("dp=4", ddp()), ("fsdp=4", fsdp(min_elements=1))])
def test_the_arrays_of_a_module_are_copied_without_a_program(recorded, mesh, strategy):
    model = drawn(lambda: Tower(nnx.Rngs(0)))
    step = step_of(model, World.emulate(4, mesh), strategy)
    check_bits(step)
    assert not recorded[0].programs


def test_the_arrays_of_a_module_stay_its_own():
    model = Tower(nnx.Rngs(0))
    step = step_of(model, World.emulate(8, "dp=8"), ddp())
    before = bits(nnx.to_pure_dict(nnx.state(model)))
    state = step.init()
    step(state, {"x": jnp.ones((8, 16))})
    after = bits(nnx.to_pure_dict(nnx.state(model)))
    assert all(before[path].tobytes() == after[path].tobytes() for path in before)


def test_arrays_that_are_given_are_taken_as_they_are(recorded):
    step = step_of(lambda: Tower(nnx.Rngs(0)), World.emulate(8, "fsdp=8"), fsdp(min_elements=1))
    target = step.weight_targets["head/kernel"]
    given = jax.device_put(jnp.full(target.shape, 3.0), target.sharding)
    pointer = given.addressable_shards[0].data.unsafe_buffer_pointer()
    state = step.init({"head/kernel": given})
    kernel = state.params["head"]["kernel"]
    assert kernel.addressable_shards[0].data.unsafe_buffer_pointer() == pointer
    assert [one.count for one in recorded[0].programs] == [4]


def test_equal_programs_with_other_numbers_are_not_shared():
    place = NamedSharding(World.emulate(8, "dp=8").mesh, PartitionSpec())

    def draws():
        first, second, third = jax.random.split(jax.random.key(0), 3)
        return (
            jax.random.normal(first, (4, 4)),
            jax.random.normal(second, (4, 4)),
            2 * jax.random.normal(third, (4, 4)),
        )

    made = InSlices(draws, (place,) * 3)
    for mine, want in zip(made(), jax.jit(draws)(), strict=True):
        np.testing.assert_array_equal(mine, want)
    assert [one.count for one in made.programs] == [2, 1]
