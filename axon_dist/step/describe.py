"""Summarizes a step on one screen, for `print`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..core.words import byte_size, plural, si
from ..sharding.apply import Explanation, LeafDecision
from .batch import BatchLayout
from .layout import StateLayout
from .plan import StepPlan
from .spec import StepSpec

_SHOWN = 3
"""How many of the arrays that stay whole are named."""


def idle_axes(spec: StepSpec) -> tuple[str, ...]:
    """Returns the mesh axes that no strategy uses: all ranks along such an axis compute the same.

    Args:
        spec: the resolved arguments of the step.
    """
    sizes = spec.world.mesh.shape.items()
    return tuple(axis for axis, size in sizes if size > 1 and axis not in spec.strategy.axes)


def replicated_arrays(layout: StateLayout) -> tuple[LeafDecision, ...]:
    """Returns the arrays that every device holds whole; see `TrainStep.replicated_arrays`."""
    strategy = layout.plan.state_plan.storage.strategy
    sizes = layout.spec.mesh.shape
    claims = layout.claims
    if any(sizes[axis] > 1 for axis in strategy.params.split_axes):
        return (*claims.params.replicated, *claims.frozen.replicated)
    if any(sizes[axis] > 1 for axis in strategy.opt_state.split_axes):
        return claims.grads.replicated
    return ()


def whole_bytes(rows: Sequence[LeafDecision]) -> int:
    """Returns the bytes per device of arrays that stay whole."""
    return sum(row.bytes for row in rows)


def whole_summary(rows: Sequence[LeafDecision]) -> str:
    """Says how many arrays stay whole, their bytes, and why the largest does; "" if none does."""
    if not rows:
        return ""
    largest = max(rows, key=lambda row: row.bytes)
    size = byte_size(whole_bytes(rows))
    subject = "the largest " if len(rows) > 1 else ""
    return (
        f"whole on every device: {plural(len(rows), 'array')} of {size}, "
        f"{subject}{largest.path!r} ({largest.decision.reason})"
    )


def summary(layout: StateLayout) -> str:
    """Says in one line what a step is: its strategy, mesh and microbatches."""
    spec = layout.spec
    world = spec.world
    count = spec.num_microbatches
    text = f"{spec.strategy.name} on mesh {world.spec} of {world.size} {world.backend} devices"
    text += f", {count} microbatches" if count > 1 else ""
    return text + "".join(f", no strategy uses axis {axis!r}" for axis in idle_axes(spec))


def describe(layout: StateLayout, batches: BatchLayout) -> str:
    """Summarizes a step on one screen: where it runs, what is split, and how it computes.

    Args:
        layout: the layout of the states of a step. Nothing is traced or compiled.
        batches: how its batches are cut.
    """
    claims = layout.claims
    tables = {
        "parameters": claims.params,
        "frozen": claims.frozen,
        "optimizer state": claims.opt_state,
    }
    whole = whole_summary(replicated_arrays(layout))
    lines = [
        f"batch: {_batch(batches)}",
        f"view: {_view(layout)}",
        *(f"{name}: {_layout(table)}" for name, table in tables.items() if table.rows),
        *([whole] if whole else []),
        *_options(layout.plan),
    ]
    return "\n".join([f"TrainStep: {summary(layout)}", *(f"  {line}" for line in lines)])


def _batch(layout: BatchLayout) -> str:
    sizes = "×".join(f"{axis}={layout.mesh.shape[axis]}" for axis in layout.axes)
    split = f"split over {sizes}" if sizes else "whole on every device"
    count = plural(layout.num_microbatches, "microbatch")
    return f"{split}, {count}; its samples divide by {layout.divisor}"


def _view(layout: StateLayout) -> str:
    found = {str(separation) for separation in layout.separations}
    pipeline = layout.spec.strategy.pipeline
    if pipeline is not None:
        schedule = pipeline.schedule
        return f"pipeline by the table {schedule.name}"
    if found:
        return "; ".join(sorted(found))
    return (
        "known once the step has been traced; axon_dist.inspect.separation(step, batch) says it "
        "for one"
    )


def _layout(table: Explanation) -> str:
    """Says how many bytes a tree has, in total and per device, and which arrays stay whole."""
    split = [row for row in table.rows if row.ways > 1]
    text = (
        f"{_bytes(table.bytes)} in {plural(len(table.rows), 'array')}, "
        f"{_bytes(table.bytes_per_device)} on each device"
    )
    if split:
        text += f"; split: {plural(len(split), 'array')} of {_size(split)}"
    whole = table.replicated
    if whole:
        largest = sorted(whole, key=lambda row: -row.bytes)[:_SHOWN]
        named = ", ".join(f"{row.path} {_bytes(row.bytes)}" for row in largest)
        more = len(whole) - len(largest)
        named += f" and {more} more" if more else ""
        text += f"; whole: {plural(len(whole), 'array')} of {_size(whole)} ({named})"
    return text


def _size(rows: Iterable[LeafDecision]) -> str:
    return _bytes(sum(row.bytes for row in rows))


def _bytes(count: int) -> str:
    return f"{si(count)}B"


def _options(plan: StepPlan) -> Sequence[str]:
    """Says the precision, the recomputation, the loop over blocks and the compiler options."""
    strategy = plan.spec.strategy
    blocks = "; ".join(map(str, plan.loop_choices)) or "known once the step has been traced"
    compiler = ", ".join(f"{name}={value}" for name, value in plan.compiler_options.items())
    # Without `remat`, blocks still recompute their elementwise results; see `with_layer_scan`.
    saves_most = plan.changes.units and not strategy.layers
    by_default = "elementwise operations of blocks" if saves_most else "nothing"
    return [
        f"precision: {strategy.precision or plan.spec.model_spec.dtype}",
        f"recomputed: {strategy.remat or by_default}",
        f"blocks: {blocks}",
        f"compiler: {compiler or 'its own defaults'}",
    ]
