"""`profile_step`: where the time of a step goes, from the peak of the chip down, traced here."""

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
from axon_dist.inspect import Waterfall, machine_of, read_trace, waterfall
from axon_dist.mesh import process_index
from axon_dist.models import TransformerConfig
from axon_dist.planner import AUTO
from axon_dist.step import TrainStep

from ..config import CONFIG, RunConfig, abstract_batch
from .directory import open_directory
from .measure import drawn_batch
from .run_model import run_config
from .steps import build_step, build_world

WARM_UP = 2
"""Steps before the trace begins: one compiles, one fills what is cached."""

SLACK = 2
"""Steps that are traced but not measured: the first, and the one that ends the last."""

_WIDTHS = {"cpu": 1024}
"""The sizes of the product whose rate is measured where a chip is not known."""


@checked(config=CONFIG, num_steps=COUNT)
def profile_step(config: RunConfig, num_steps: int = 3) -> Waterfall:
    """Traces some steps of a config on its devices, and says where their time goes.

    The batch is drawn and already on the devices: what loading data costs is not part of it.

    Args:
        config: a run as YAML describes it, checked; its data are not read, nothing is written.
        num_steps: steps that are measured; the row of each kind is their mean.

    Returns:
        The waterfall, with the option for each loss where one is known.

    Raises:
        ConfigError: for fewer than one step.
        UnsupportedError: when the profiler gives no operations of these devices.
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
    """Profiles the step of a run, and keeps the waterfall in its folder for `axon report`.

    Args:
        run: the folder of a run.
        overrides: changes of its config, such as `"mesh=dp=4"` for the devices that are here.
        num_steps: steps that are measured.
        trust: whether functions that the run's config names may be imported and called.

    Raises:
        ConfigError: when there is no run in the folder, or an override is wrong.
        UnsupportedError: as `profile_step`.
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
    """Runs the step, and traces its last runs."""
    placed, state = step.place(batch), step.init()
    for _ in range(WARM_UP):
        state, _ = step(state, placed)
    jax.block_until_ready(state)
    options = jax.profiler.ProfileOptions()
    # Calls of Python would be most of the trace, and slow down what is measured.
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        for number in range(num_runs):
            with jax.profiler.StepTraceAnnotation("train_step", step_num=number):
                state, _ = step(state, placed)
        jax.block_until_ready(state)


def peak_flops(mesh: jax.sharding.Mesh, program: str = "") -> tuple[float, str]:
    """FLOP/s of one device of a mesh at best, and where the number is from.

    Args:
        mesh: of devices that are here.
        program: the text of the step; one with numbers in fp8 is measured by the rate of these.

    Returns:
        The rate of the chip's data sheet; of devices without one, such as CPUs, that of a product
        that is measured here. Emulated devices share it.
    """
    device = mesh.devices.flat[0]
    if chip := machine_of(mesh):
        is_fp8 = "f8e4m3" in program and chip.float8_rate > 1
        dtype = "float8_e4m3fn" if is_fp8 else "bfloat16"
        return chip.rate(dtype), f"{dtype} by the data sheet of {chip.name}"
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
    """FLOP/s of the fastest of some square products."""
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
"""The share of a step that a loss must have for an option to be named."""


def advice(found: Waterfall, config: RunConfig, step: TrainStep) -> dict[str, str]:
    """The option that would give some of a loss back, by its kind.

    Args:
        found: the waterfall of the step.
        config: of the step.
        step: built from it.

    Returns:
        A sentence for each kind for which an option is known; it names the key of the config.
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
        return "memory: remat: auto recomputes no more than it has to"
    own = config.remat is not None
    option = "remat: auto" if own else "full_shard's activation_checkpointing"
    return f"{option} recomputes only what memory asks for" if own else f"leave out {option}"


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
