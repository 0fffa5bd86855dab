"""Options of the compiler: the chip's, those of the user over them, and what is refused.

Emulated devices have none: here the table has a row for them, with a pass of the compiler left out.
"""

import dataclasses

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
    context_parallel,
    ddp,
    fsdp,
    tensor_parallel,
    zero,
)
from axon_dist.core.errors import ConfigError
from axon_dist.mesh.chips import PIPELINED
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.step.compiler import compiler_options

GATHERS = next(name for name in PIPELINED if name.endswith("all_gather"))
NAME = "xla_disable_hlo_passes"


def build(world, strategy=fsdp(axes=("dp",), min_elements=8), **options):  # noqa: B008
    return build_train_step(
        lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0)), optax.sgd(0.1),
        lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2),
        strategy, world, **options,
    )  # fmt: skip


def batch():
    draw = np.random.default_rng(0).standard_normal
    return {name: draw((16, 16)).astype(np.float32) for name in "xy"}


def test_emulated_devices_have_none(world):
    assert build(world).compiler_options == {}
    assert compiler_options(world, dict.fromkeys(PIPELINED)) == {}


def test_a_chip_brings_its_own_and_the_user_comes_last(world, chip):
    assert compiler_options(world) == {NAME: "algsimp"}
    assert compiler_options(world, {NAME: "dce"}) == {NAME: "dce"}
    assert compiler_options(world, {NAME: None}) == {}
    more = {"xla_cpu_enable_fast_math": False}
    assert build(world, compiler_options=more).compiler_options == {NAME: "algsimp", **more}


@pytest.mark.parametrize(
    ("strategy", "alone"),
    [
        (ddp("dp"), True), (fsdp(axes=("dp",), min_elements=8), False),
        (zero(1, "dp", min_elements=8), False),
        (compose(ddp("dp"), tensor_parallel({"": "column"}, axis="tp")), False),
    ],
    ids=["ddp", "full_shard", "zero1", "ddp + tp"],
)  # fmt: skip
def test_sums_alone_have_options_of_their_own(chip, strategy, alone, monkeypatch):
    """Above those of the chip, below those of the user."""
    row = dataclasses.replace(chip, sums_only_options=((NAME, "dce"),))
    monkeypatch.setattr("axon_dist.step.compiler.options_row_of", lambda mesh: row)
    world = World.emulate(8, "dp=4,tp=2" if "tensor" in strategy.name else "dp=8")
    make = lambda **options: build(world, strategy, **options).compiler_options
    assert make() == {NAME: "dce" if alone else "algsimp"}
    assert make(compiler_options={NAME: "cse"}) == {NAME: "cse"}


@pytest.mark.parametrize(
    ("layers", "axes", "several"),
    [
        (context_parallel(), "dp=2,cp=4", True),
        (context_parallel("ulysses"), "dp=4,cp=2", False),
        (tensor_parallel("transformer"), "dp=4,tp=2", False),
    ],
    ids=["ring", "ulysses", "tensor"],
)
def test_rings_over_positions_have_several_transfers_in_flight(
    chip, layers, axes, several, monkeypatch
):
    row = dataclasses.replace(chip, parallel_options=((NAME, "dce"),))
    monkeypatch.setattr("axon_dist.step.compiler.options_row_of", lambda mesh: row)
    config = TransformerConfig(64, width=32, num_layers=1, num_heads=2)
    model, world = lambda: Transformer(config, rngs=nnx.Rngs(0)), World.emulate(8, axes)
    strategy = compose(ddp("dp"), layers)
    step = build_train_step(model, optax.sgd(1.0), next_token_loss, strategy, world)
    assert step.compiler_options == {NAME: "dce" if several else "algsimp"}


@pytest.mark.parametrize(
    ("strategy", "whole"),
    [
        (ddp("dp"), True), (zero(2, "dp", min_elements=8), True),
        (fsdp("shard_grad_op", axes=("dp",), min_elements=8), True),
        (fsdp(axes=("dp",), min_elements=8, reduction=Reduction(per="step")), True),
        (fsdp(axes=("dp",), min_elements=8), False),
        (compose(zero(1, "dp", min_elements=8), tensor_parallel({"": "column"}, axis="tp")), True),
    ],
    ids=["ddp", "zero2", "shard_grad_op", "full_shard per step", "full_shard", "zero1 + tp"],
)  # fmt: skip
def test_weights_that_are_whole_have_options_of_their_own(chip, strategy, whole, monkeypatch):
    """Above those of the chip, below those of sums alone."""
    row = dataclasses.replace(chip, no_gather_options=((NAME, "dce"),))
    monkeypatch.setattr("axon_dist.step.compiler.options_row_of", lambda mesh: row)
    world = World.emulate(8, "dp=4,tp=2" if "tensor" in strategy.name else "dp=8")
    assert build(world, strategy).compiler_options == {NAME: "dce" if whole else "algsimp"}
    row = dataclasses.replace(row, sums_only_options=((NAME, "cse"),))
    last = build(world, strategy).compiler_options
    assert last == {NAME: "cse" if strategy.sends_only_sums else "dce" if whole else "algsimp"}


def test_options_unknown_to_the_compiler_are_dropped_with_a_warning(world, chip, monkeypatch):
    """An option that the user asks for is refused, also where the chip has it."""
    bogus = (("xla_bogus", True), ("xla_gone", 4))
    row = dataclasses.replace(chip, options=chip.options + bogus)
    monkeypatch.setattr("axon_dist.step.compiler.options_row_of", lambda mesh: row)
    word = "emulated devices does not know xla_bogus, xla_gone, which the table of chips has"
    with pytest.warns(UserWarning, match=word):
        assert compiler_options(world) == {NAME: "algsimp"}
    with pytest.raises(ConfigError, match=r"refuses its options.*'xla_gone'"):
        compiler_options(world, {"xla_gone": 5})


def test_every_program_of_the_step_is_compiled_with_them(world, chip):
    """The pass that was left out shows in what the compiler was given, for all three."""
    found = {}
    for name, given in (("chip", None), ("bare", {NAME: None})):
        step = build(world, compiler_options=given)
        state, placed = step.init(), step.place(batch())
        programs = (
            step.lower(batch()),
            step.programs.evaluate.lower(state, placed),
            step.programs.gradients.lower(state, placed),
        )
        found[name] = [lowered.compile().as_text() for lowered in programs]
    assert all(one != other for one, other in zip(found["chip"], found["bare"], strict=True))


def test_the_running_program_is_the_lowered_one(world, chip):
    """The executable that a call has made, asked of the runtime itself."""
    client = world.mesh.devices.flat[0].client
    step = build(world)
    state, placed = step.init(), step.place(batch())
    before = [id(program) for program in client.live_executables()]
    state, _ = jax.block_until_ready(step(state, placed))
    (ran,) = (p for p in client.live_executables() if id(p) not in before)
    text = ran.hlo_modules()[0].to_string()
    bare = build(world, compiler_options={NAME: None}).lower(batch()).compile().as_text()
    assert operations(text) == operations(step.lower(batch()).compile().as_text())
    assert operations(text) != operations(bare)


def operations(text):
    """Lines without their backend's settings, whose fields come in any order."""
    return [line.partition(", backend_config=")[0] for line in text.splitlines()]


def test_options_change_no_number(world, chip):
    """The same step with the options of a chip and without them."""
    losses = []
    for given in (None, {NAME: None}):
        step = build(world, compiler_options=given)
        state = step.init()
        for _ in range(3):
            state, metrics = step(state, batch())
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["xla"], r"compiler_options=\['xla'\], a list; give a mapping"),
        ({"xla_cpu_x": [1]}, r"compiler_options has 'xla_cpu_x': \[1\]; names must be strings"),
        ({7: True}, "compiler_options has 7: True; names must be strings"),
        (
            {f"{GATHERS}s": None},
            f"removes '{GATHERS}s', which no chip sets. Did you mean '{GATHERS}'",
        ),
        ({"xla_bogus": True}, r"emulated devices refuses .*'xla_bogus'.*was given xla_bogus=True"),
        ({"xla_cpu_enable_fast_math": "maybe"}, "'maybe' is not a valid bool value"),
    ],
)
def test_wrong_options_are_refused_when_the_step_is_built(world, given, message):
    with pytest.raises(ConfigError, match=message):
        build(world, compiler_options=given)


def test_deterministic_is_not_undone(world, monkeypatch):
    fixed = {"xla_cpu_enable_fast_math": False}
    monkeypatch.setattr("axon_dist.step.compiler.deterministic_options", lambda world, kind: fixed)
    assert compiler_options(world, deterministic=True) == fixed
    assert compiler_options(world, {**fixed, NAME: "dce"}, deterministic=True) == {
        **fixed, NAME: "dce"
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"compiles with xla_cpu_enable_fast_math=False, but com"):
        compiler_options(world, {"xla_cpu_enable_fast_math": "true"}, deterministic=True)
