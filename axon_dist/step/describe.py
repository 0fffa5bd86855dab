"""What `print` shows of a step: a summary on one screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..core.words import plural, si
from ..sharding.apply import Explanation, LeafDecision

if TYPE_CHECKING:
    from .step import TrainStep

_SHOWN = 3
"""How many of the arrays that stay whole are named."""


def describe(step: TrainStep) -> str:
    """Summarizes a step on one screen: where it runs, what is split, and how it computes.

    Args:
        step: a built step. Nothing is traced or compiled.
    """
    claims = step.claims
    tables = [claims.params, claims.frozen, claims.opt_state]
    names = ["parameters", "frozen", "optimizer state"]
    lines = [
        f"{repr(step).removeprefix('TrainStep(').removesuffix(')')}",
        f"batch: {_batch(step)}",
        f"view: {_view(step)}",
        *(f"{name}: {_layout(table)}" for name, table in zip(names, tables, strict=True)
          if table.rows),
        *([step.whole_summary] if step.whole else []),
        *_options(step),
    ]  # fmt: skip
    first, *others = lines
    return "\n".join([f"TrainStep: {first}", *(f"  {line}" for line in others)])


def _batch(step: TrainStep) -> str:
    layout = step.layout
    sizes = "×".join(f"{axis}={layout.mesh.shape[axis]}" for axis in layout.axes)
    split = f"split over {sizes}" if sizes else "whole on every device"
    count = plural(layout.num_microbatches, "microbatch")
    return f"{split}, {count}; its samples divide by {layout.divisor}"


def _view(step: TrainStep) -> str:
    found = {str(separation) for separation in step.spec.replica(region=False).separator.found}
    if step.strategy.pipeline is not None:
        schedule = step.strategy.pipeline.schedule
        return f"pipeline by the table {schedule.name}"
    if found:
        return "; ".join(sorted(found))
    return "known once the step has seen a batch; step.separation(batch) says it for one"


def _layout(table: Explanation) -> str:
    """Says how many bytes a tree has, in total and per device, and which arrays stay whole."""
    split = [row for row in table.rows if row.ways > 1]
    text = (
        f"{_bytes(table.bytes)} in {plural(len(table.rows), 'array')}, "
        f"{_bytes(table.bytes_per_device)} on each device"
    )
    if split:
        text += f"; split: {plural(len(split), 'array')} of {_size(split)}"
    if table.whole:
        largest = sorted(table.whole, key=lambda row: -row.bytes)[:_SHOWN]
        named = ", ".join(f"{row.path} {_bytes(row.bytes)}" for row in largest)
        more = len(table.whole) - len(largest)
        named += f" and {more} more" if more else ""
        text += f"; whole: {plural(len(table.whole), 'array')} of {_size(table.whole)} ({named})"
    return text


def _size(rows: Iterable[LeafDecision]) -> str:
    return _bytes(sum(row.bytes for row in rows))


def _bytes(count: int) -> str:
    return f"{si(count)}B"


def _options(step: TrainStep) -> Sequence[str]:
    """Says the precision, the recomputation, the loop over blocks and the compiler options."""
    strategy = step.strategy
    blocks = "; ".join(map(str, step.loop_choices)) or "known once the step has seen a batch"
    compiler = ", ".join(f"{name}={value}" for name, value in step.compiler_options.items())
    return [
        f"precision: {strategy.precision or step.parts.dtype}",
        f"recomputed: {strategy.remat or 'nothing'}",
        f"blocks: {blocks}",
        f"compiler: {compiler or 'its own defaults'}",
    ]
