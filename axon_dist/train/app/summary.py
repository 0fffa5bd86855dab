"""Describes a run in words: its plan at the start, and its results at the end."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping

import jax.numpy as jnp
from jax.typing import DTypeLike
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from axon_dist.core.tree import leaves_with_paths, num_params
from axon_dist.core.typing import JsonDict
from axon_dist.core.words import AUTO, byte_size, clock_time, plural, si
from axon_dist.mesh import World, rank_table
from axon_dist.models import TransformerConfig, describe_attention
from axon_dist.optim import decayed
from axon_dist.parallel import ContextMode
from axon_dist.planner import read_step, usable_bytes
from axon_dist.planner.reading import LADDER, recomputing_line
from axon_dist.step import ModelSpec, TrainStep, idle_axes, leaves_remat_open
from axon_dist.train.loop import TrainResult

from ..config import Decaying, Optimizer, RunConfig, abstract_batch
from .run_records import END
from .runs import Run
from .steps import build_step


def opening_lines(run: Run) -> list[str]:
    """Describes a run before it starts; all processes must call this."""
    train = run.config.train
    spec = run.world.spec
    kind = run.world.runtime_info()["device_kind"]
    parameters = parameters_of(run.step.model_spec)
    batch = run.config.kind.task.batch(train.global_batch, run.config.data)
    table = rank_table(run.world) if run.world.num_processes > 1 else []
    return [
        *table,
        f"{run.config.name}: {parameters}, {run.step.strategy.name} on mesh {spec} of "
        f"{run.world.size} {run.world.backend} {kind} devices",
        *(
            f"no strategy uses axis {axis} of the mesh: its {run.world.mesh.shape[axis]} ranks "
            "compute the same values (a list composes strategies: parallel: [ddp, tensor])"
            for axis in idle_axes(run.step.spec)
        ),
        *filter(None, [attention_line(run.config, run.step)]),
        *map(str, run.step.loop_choices),
        f"data: {run.loader.description}",
        f"{plural(train.steps, 'step')} of {batch}{_epochs_of(run)}",
        *_batch_lines(run),
        *filter(None, [remat_line(run.config, run.step), _decay_line(run), run.note]),
    ]


def _epochs_of(run: Run) -> str:
    """Describes how often a run sees the samples of each source, and its validation data."""
    train = run.config.train
    samples = train.steps * train.global_batch
    epochs = ", ".join(
        f"{one.after(samples):.3g} epochs of {plural(one.size, 'sample')}"
        for one in run.loader.epochs
    )
    when = f"every {plural(train.eval_every, 'step')}" if train.eval_every else "at the end"
    validated = run.loader.num_validated(train.eval_batches)
    batches = -(-validated // train.global_batch)
    return (
        f", {epochs}; validated {when} on {plural(validated, 'sample')}"
        f" in {plural(batches, 'batch')}"
    )


def _batch_lines(run: Run) -> list[str]:
    """Lists the arrays of a global batch, and those converted from a wider floating-point dtype."""
    arrays = abstract_batch(run.config).items()
    source_dtypes = getattr(run.loader.samples, "given_dtypes", {})
    return [
        f"batch: {', '.join(f'{name} {x.dtype}{list(x.shape)}' for name, x in arrays)}",
        *(
            f"batch {name}: {source_dtypes[name]} is taken as {x.dtype}"
            for name, x in arrays
            if x.dtype.kind == "f" and source_dtypes.get(name, x.dtype.name) != x.dtype.name
        ),
    ]


def _decay_line(run: Run) -> str | None:
    """Describes which parameters have weight decay; None if all or none do."""
    optimizer = run.config.optimizer
    if not isinstance(optimizer, Decaying):
        return None
    own = optimizer.weight_decay
    is_masked = optimizer.mask is not None and own > 0
    flags = leaves_with_paths(decayed(run.step.model_spec.params))
    rates = Counter(
        _group_decay(optimizer, path, own if is_matrix or not is_masked else 0.0)
        for path, is_matrix in flags
    )
    if len(rates) < 2:
        return None
    counts = [f"{rate:g} on {count}" for rate, count in sorted(rates.items()) if rate]
    but = ", not on norms, biases and embeddings (optimizer.decay=all for all)" if is_masked else ""
    has_groups = any(group.weight_decay is not None for group in optimizer.groups)
    groups = ", with the decay of their group where it has one" if has_groups else ""
    return f"weight decay {' and '.join(counts)} of {rates.total()} parameters{but}{groups}"


def _group_decay(optimizer: Optimizer, path: str, otherwise: float) -> float:
    """Returns the weight decay of the group of a parameter, if that sets one."""
    group = next((group for group in optimizer.groups if group.has(path)), None)
    return otherwise if group is None or group.weight_decay is None else group.weight_decay


def parameters_of(model_spec: ModelSpec) -> str:
    """Counts the parameters of a model, and how many are trained and frozen."""
    count = f"{si(num_params(model_spec.weights), 'B')} parameters"
    if not model_spec.frozen:
        return count
    sizes: dict[str, int] = {}
    for path, leaf in leaves_with_paths(model_spec.frozen):
        dtype = "int8" if path in model_spec.int8 else str(leaf.dtype)
        sizes[dtype] = sizes.get(dtype, 0) + math.prod(leaf.shape)
    frozen = ", ".join(f"{si(size, 'B')} frozen in {dtype}" for dtype, size in sizes.items())
    return f"{count} ({si(num_params(model_spec.params), 'B')} trained, {frozen})"


def summarize(run: Run, result: TrainResult) -> JsonDict:
    """Returns the results of a run as plain data."""
    training = [loss for _, loss in result.train_curve]
    validation = [loss for _, loss in result.validation_curve]
    return {
        "name": run.config.name,
        "ended": result.reason,
        "steps": result.num_steps,
        "first_step": result.first_step,
        "train_loss": training[-1] if training else None,
        "validation_loss": validation[-1] if validation else None,
        "best_validation_loss": min(filter(math.isfinite, validation), default=None),
        "validation_metrics": {
            name: curve[-1][1] for name, (_, curve) in result.metric_curves.items()
        },
        "unit": run.unit,
        "item": run.item,
        "items_per_second": result.items_per_second,
        "compile_seconds": result.compile_seconds,
        "train_seconds": result.train_seconds,
        "seconds": dict(result.seconds),
        "step_percentiles": {str(p): x for p, x in result.step_percentiles.items()},
        "skipped_steps": result.skipped_steps,
        "rollbacks": result.rollbacks,
        "parameters": num_params(run.step.model_spec.weights),
        "state_bytes_per_device": result.device_bytes,
        "strategy": run.step.strategy.name,
        **run.world.runtime_info(),
    }


def summary_table(summary: JsonDict) -> Table:
    """Formats the results of a run as a table.

    Args:
        summary: the result of `summarize`, plus the seconds before and after the loop.
    """
    total_seconds = sum(summary["seconds"].values())
    since = f" since step {summary['first_step']}" if summary["first_step"] else ""
    unit = summary["unit"]
    item = summary["item"]
    speed = summary["items_per_second"]
    rows = {
        "ended": f"{summary['ended']} after {plural(summary['steps'], 'step')}",
        "training loss": _loss(summary["train_loss"], unit),
        "validation loss": _loss(summary["validation_loss"], unit),
        **{
            f"validation {name}": f"{value:.4f}"
            for name, value in summary["validation_metrics"].items()
        },
        "speed": "unknown" if speed is None else f"{si(speed)} {item}/s",
        f"time{since}": f"{clock_time(total_seconds)}, of which {_spent(summary, total_seconds)}",
        "train state": f"{byte_size(summary['state_bytes_per_device'])} per device",
    }
    return two_columns(rows, summary["name"])


def two_columns(rows: Mapping[str, str], title: str | None = None) -> Table:
    """Builds a table of labels and values."""
    columns = Column(style="dim"), Column(style="bold")
    table = Table(*columns, title=title, box=SIMPLE_HEAD, show_header=False, title_justify="left")
    for label, value in rows.items():
        table.add_row(label, value)
    return table


def _spent(summary: JsonDict, total_seconds: float) -> str:
    """Describes where a run spent its time; leaves out entries below half a second."""
    by_kind = summary["seconds"]
    known = {
        "compiling": by_kind["compile"],
        "in training steps": summary["train_seconds"],
        "validating": by_kind["validation"],
        "saving": by_kind["save"],
        "ending": by_kind[END],
        "elsewhere": by_kind["other"],
    }
    spent = {"starting": total_seconds - sum(known.values()), **known}
    return ", ".join(
        f"{clock_time(x)} {name}" for name, x in spent.items() if round(x) or name == "starting"
    )


def remat_line(config: RunConfig, step: TrainStep) -> str | None:
    """Describes the choice of `remat: auto` and its savings; None if there was no choice.

    Args:
        config: a run as YAML describes it.
        step: its step.
    """
    if config.remat != AUTO:
        return None
    plain = build_step(dataclasses.replace(config, remat=None), step.world)
    if not leaves_remat_open(plain):
        return None
    batch = abstract_batch(config)
    usable = usable_bytes(step.world)
    recomputed = build_step(dataclasses.replace(config, remat=LADDER["every block"]), step.world)
    return recomputing_line(
        step.strategy.remat, read_step(step, batch), read_step(recomputed, batch), usable
    )


def _loss(loss: float | None, unit: str) -> str:
    return "not measured" if loss is None else f"{loss:.4f} {unit}".rstrip()


_WITHOUT_WINDOWS = "without local_rope_theta, and with max_length within the shortest window"


def attention_line(config: RunConfig, step: TrainStep) -> str | None:
    """Describes which attention runs; None for a model that is no `Transformer`.

    Args:
        config: a checked run.
        step: its step, which determines the strategy and the devices.
    """
    model = config.model
    if not isinstance(model, TransformerConfig):
        return None
    if model.has_special_scores:
        is_capped = model.attention_softcap is not None
        # A score cap is part of what the model computes, so nothing else lets a kernel run.
        advice = "" if is_capped else f"; {_WITHOUT_WINDOWS}, they can run"
        return (
            "attention: einsum, which stores the scores of all pairs: fused kernels support "
            f"neither score caps nor windows per layer{advice}"
        )
    rings = [x for x in step.strategy.layers if getattr(x, "mode", None) is ContextMode.RING]
    # In ring attention each rank has two pieces of the sequence, and a kernel sees one of them.
    pieces = 2 * step.world.mesh.shape[rings[0].axes[0]] if rings else 1
    precision = step.strategy.precision
    dtype: DTypeLike = model.dtype or (
        model.param_dtype if precision is None else precision.compute
    )
    shape = config.data.sequence_length // pieces, model.num_heads, model.key_size
    segments = "segments" in getattr(config.data, "arrays", ())
    platform = platform_of(step.world)
    description = describe_attention(
        model.attention, platform, jnp.dtype(dtype), shape, segments, tiled=bool(rings)
    )
    return f"attention: {'around a ring, by pairs of blocks: ' if rings else ''}{description}"


def attention_rows(world: World) -> dict[str, str]:
    """Describes the attention that `auto` selects on these devices, by compute dtype."""
    shape = 1024, 8, 64
    return {
        name: describe_attention("auto", platform_of(world), jnp.dtype(name), shape)
        for name in ("bfloat16", "float32")
    }


def platform_of(world: World) -> str:
    """Returns the platform of the devices, present or not: `cpu`, `gpu` or `tpu`."""
    platform = world.mesh.devices.flat[0].platform
    return "gpu" if platform in ("cuda", "gpu", "rocm") else platform
