"""`profile_step` traces a step, and attributes the gap between its time and the chip's peak."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from axon_dist.core.checks import COUNT, checked
from axon_dist.core.files import Address
from axon_dist.core.words import AUTO
from axon_dist.inspect import Waterfall, machine_of, read_trace, waterfall
from axon_dist.mesh import process_index
from axon_dist.models import TransformerConfig
from axon_dist.step import TrainStep

from ..config import CONFIG, RunConfig, abstract_batch
from .directory import open_directory
from .measure import drawn_batch
from .run_model import run_config
from .steps import build_step, build_world

WARM_UP = 2
"""The number of steps before the trace: one compiles, one fills caches."""

SLACK = 2
"""The number of steps that are traced but not measured: the first one and the last one."""

_WIDTHS = {"cpu": 1024}
"""The size of the matrix product that is timed if the chip is unknown, by platform."""


@checked(config=CONFIG, num_steps=COUNT)
def profile_step(config: RunConfig, num_steps: int = 3) -> Waterfall:
    """Traces some steps of a config on its devices, and reports where their time goes.

    The batch is random and already on the devices, so the time to load data is not included.

    Args:
        config: a checked run, as YAML describes it; its data are not read, and nothing is written.
        num_steps: the number of measured steps; each row is the mean over them.

    Returns:
        The waterfall, with a config option that reduces each loss, if one is known.

    Raises:
        ConfigError: for fewer than one step.
        UnsupportedError: when the profiler reports no operations for these devices.
    """
    world = build_world(config)
    step = build_step(config, world)
    batch = drawn_batch(config)
    compiled = step.lower(abstract_batch(config)).compile()
    text = compiled.as_text() or ""
    with tempfile.TemporaryDirectory(prefix="axon-profile-") as folder:
        _trace(step, batch, num_steps + SLACK, folder)
        events = read_trace(folder)
    peak, source = peak_flops(world.mesh, text)
    kind = world.mesh.devices.flat[0].device_kind
    found = waterfall(events, text, num_steps + SLACK, peak, source, kind)
    return found.with_advice(advice(found, config, step))


def profile_run(
    run: str | Path, overrides: Sequence[str] = (), num_steps: int = 3, *, trust: bool = False
) -> Waterfall:
    """Profiles the step of a run, and writes the waterfall into its folder for `axon report`.

    Args:
        run: the folder of a run.
        overrides: changes to its config, such as `"mesh=dp=4"` for the present devices.
        num_steps: the number of measured steps.
        trust: whether functions that the run's config names may be imported and called.

    Raises:
        ConfigError: when there is no run in the folder, or an override is wrong.
        UnsupportedError: when the profiler reports no operations for these devices.
        StoreError: when the run is in a bucket that cannot be written.
    """
    config = run_config(run, overrides, trust=trust)
    found = profile_step(config, num_steps)
    if process_index() == 0:
        directory = open_directory(run)
        text = json.dumps(found.to_dict(), indent=2) + "\n"
        place = directory.place
        if isinstance(place, Address):
            (place / directory.waterfall.name).write(text.encode())
        else:
            directory.waterfall.write_text(text, encoding="utf-8")
    return found


def _trace(step: TrainStep, batch: Any, num_runs: int, folder: str) -> None:
    """Runs the step a few times untraced, then traces `num_runs` runs."""
    placed = step.place(batch)
    state = step.init()
    for _ in range(WARM_UP):
        state, _ = step(state, placed)
    jax.block_until_ready(state)
    options = jax.profiler.ProfileOptions()
    # Python calls would dominate the trace and slow down the measured steps.
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        for number in range(num_runs):
            with jax.profiler.StepTraceAnnotation("train_step", step_num=number):
                state, _ = step(state, placed)
        jax.block_until_ready(state)


def peak_flops(mesh: jax.sharding.Mesh, program: str = "") -> tuple[float, str]:
    """Returns the peak FLOP/s of one device of a mesh, and the source of the number.

    Args:
        mesh: a mesh of present devices.
        program: the text of the compiled step; if it uses fp8, the peak is that of fp8.

    Returns:
        The rate from the chip's data sheet. For devices without a data sheet, such as CPUs, the
        measured rate of a matrix product, divided by the number of emulated devices.
    """
    device = mesh.devices.flat[0]
    if chip := machine_of(mesh):
        is_fp8 = "f8e4m3" in program and chip.float8_rate > 1
        name, share = ("float8_e4m3fn", chip.float8_rate) if is_fp8 else ("bfloat16", 1.0)
        return chip.flops * share, f"{name} by the data sheet of {chip.name}"
    is_cpu = device.platform == "cpu"
    width = _WIDTHS.get(device.platform, 4096)
    dtype = jnp.float32 if is_cpu else jnp.bfloat16
    rate = _measured_rate(device, width, dtype)
    local = [d for d in mesh.devices.flat if d.process_index == device.process_index]
    sharing = len(local) if is_cpu else 1
    shared = f", shared by {sharing} devices" if sharing > 1 else ""
    name = jnp.dtype(dtype).name
    return rate / sharing, f"measured here by a {name} product of {width} x {width}{shared}"


def _measured_rate(device: Any, width: int, dtype: Any, rounds: int = 5) -> float:
    """Returns the FLOP/s of the fastest of several square matrix products."""
    square = jax.device_put(jnp.ones((width, width), dtype), device)
    multiply = jax.jit(jnp.dot)
    multiply(square, square).block_until_ready()
    best = float("inf")
    for _ in range(rounds):
        begun = time.perf_counter()
        multiply(square, square).block_until_ready()
        best = min(best, time.perf_counter() - begun)
    return 2 * width**3 / best


WORTH = 0.02
"""The smallest fraction of a step for which advice is given."""


def advice(found: Waterfall, config: RunConfig, step: TrainStep) -> dict[str, str]:
    """Suggests config options that reduce the losses of a step.

    Args:
        found: the waterfall of the step.
        config: the config of the step.
        step: the step built from it.

    Returns:
        A sentence for each kind of loss with a known option; it names the config key.
    """
    shares = {loss.kind: loss.seconds / found.step_seconds for loss in found.losses}
    lines = {loss.kind: loss.places[0].source for loss in found.losses if loss.places}
    rules: dict[str, Callable[[], str]] = {
        "products": lambda: _narrower(config, step) or _more_samples("larger products"),
        "attention": lambda: _narrower(config, step),
        "recomputed": lambda: _recompute_less(config, step),
        "kernels": lambda: _narrower_logits(config, lines.get("kernels", "")),
        "copies": lambda: _unrolled(config),
        "wire": lambda: (
            "a larger train.global_batch or train.accumulate sends less often; axon plan ranks "
            "other meshes"
        ),
        "gaps": lambda: _more_samples("longer kernels"),
        "host": lambda: _more_samples("longer steps"),
    }
    sentences = {kind: rule() for kind, rule in rules.items() if shares[kind] >= WORTH}
    return {kind: sentence for kind, sentence in sentences.items() if sentence}


def _more_samples(what: str) -> str:
    return f"a larger train.global_batch, where training allows it, gives {what}"


def _narrower(config: RunConfig, step: TrainStep) -> str:
    precision = step.strategy.precision
    compute = jnp.float32 if precision is None else precision.compute
    if step.world.is_cpu or jnp.dtype(compute).itemsize < 4:
        return ""
    return "precision: bf16 multiplies faster, and lets fused attention run"


def _recompute_less(config: RunConfig, step: TrainStep) -> str:
    if config.remat == AUTO:
        return "remat: auto already recomputes only what memory requires"
    if config.remat is not None:
        return "remat: auto recomputes only as much as memory requires"
    return "leave out the activation_checkpointing of fsdp"


def _narrower_logits(config: RunConfig, line: str) -> str:
    model = config.model
    if not isinstance(model, TransformerConfig) or not line.startswith("linear_loss"):
        return ""
    if model.logits_dtype != "float32":
        return ""
    return "model.logits_dtype: bfloat16 halves the traffic of the loss, and rounds its logits"


def _unrolled(config: RunConfig) -> str:
    model = config.model
    if getattr(model, "scan_layers", False):
        return "model.scan_layers: false keeps no stacks of residuals"
    layers = getattr(model, "num_layers", 0)
    if config.unroll == 1 or layers > (config.unroll or 0) > 0:
        return f"unroll: {max(layers, 2)} writes blocks out, without stacks of residuals"
    return ""
