"""The loss as the program that a pipeline cuts, and in what order it calls the blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.typing import Array, Batch, LossFn, Path, PyTree
from ..core.weighted import Weighted
from ..jaxpr.linen import linen_modules, looped_inputs
from ..jaxpr.rows import Stacked, by_rows, whole
from ..jaxpr.units import mark_units
from ..jaxpr.walk import opened
from ..pipeline import Calls, Keys, LossTrace, Stacks, buffers_together, has_apart, trace_loss
from ..pipeline.layout import flatten
from .objective import Outcome, evaluate, weighed_metrics
from .parts import ModelParts


def traced(
    run: Callable[[PyTree, PyTree, Batch], Outcome],
    spelled: Callable[[Callable[..., Any]], Callable[..., Any]],
    stacks: Stacks,
    params: PyTree,
    buffers: PyTree,
    batch: Batch,
) -> LossTrace:
    """The loss of a batch as a program, of a model whose stacked blocks are taken apart.

    Args:
        run: (params of the model, buffers, batch) -> outcome, its blocks marked as units.
        spelled: changes the function that is traced.
        stacks: the modules of the model that hold many blocks.
        params: shapes, the blocks of stacks by themselves.
        buffers: arrays or shapes, as the model has them or with those of blocks by themselves.
        batch: likewise.

    Returns:
        The program.
    """

    def forward(params: PyTree, buffers: PyTree, batch: Batch) -> Any:
        outcome = run(params, buffers, batch)

        def wide(x):
            return jnp.asarray(x, jnp.float32)

        loss, metrics = outcome.loss, _flat(weighed_metrics(outcome))
        return wide(loss.total), wide(loss.weight), metrics, outcome.buffers

    spelling = spelled(forward)
    if stacks.depths:
        # A loop over stacked blocks, as the model has it, hides which of them a call reads.
        layers = by_rows(spelling)

        def of_rows(params: PyTree, apart: PyTree, batch: Batch) -> Any:
            given = stacks.together(params, Stacked), buffers_together(apart, Stacked)
            *results, after = layers(*given, batch)
            # As they came: where each block has its own, by themselves.
            own = stacks.buffers_apart(after) if has_apart(apart) else after
            return jax.tree.map(whole, (*results, own))

        spelling = of_rows
    return trace_loss(spelling, params, buffers, batch)


def _flat(metrics: dict[str, Array | Weighted]) -> dict[tuple[str, str], Array]:
    """Metrics by name and part: those with a weight of their own have two."""
    found: dict[tuple[str, str], Array] = {}
    for name, value in metrics.items():
        if isinstance(value, Weighted):
            found[name, "total"] = jnp.asarray(value.total)
            found[name, "weight"] = jnp.asarray(value.weight)
        else:
            found[name, ""] = value
    return found


def nested_metrics(found: dict[tuple[str, str], Array]) -> dict[str, Array | Weighted]:
    """The inverse of `_flat`."""
    alone = {name: value for (name, part), value in found.items() if not part}
    own = {name for name, part in found if part}
    return {**alone, **{n: Weighted(found[n, "total"], found[n, "weight"]) for n in own}}


def unit_paths(blocks: Iterable[Keys], stacks: Stacks) -> tuple[frozenset[Path], frozenset[Path]]:
    """The paths of the modules of a model whose calls are those of blocks; of which stack them."""
    modules = {stacks.in_model(keys): "/".join(map(str, stacks.in_model(keys))) for keys in blocks}
    looped = frozenset(path for keys, path in modules.items() if stacks.depth_of(keys))
    return frozenset(modules.values()), looped


def loops_in(parts: ModelParts, loss_fn: LossFn, batch: Batch) -> dict[Keys, int]:
    """The Linen modules whose parameters stack those of the layers that a loop of the loss calls.

    `nn.scan` gives no other sign of them: a kernel of three dims may be one layer's.

    Args:
        parts: the model's structure, and the shapes of its parameters and buffers.
        loss_fn: the user's loss.
        batch: arrays or shapes, with what samples have in common unwrapped.

    Returns:
        The outermost, by keys, and how many layers each has.
    """
    modules = [keys for keys, _ in linen_modules(parts.abstract)]
    if not modules:
        return {}
    weights, buffers = dataclasses.replace(parts, shared={}).arguments

    def run(params: PyTree, buffers: PyTree, batch: Batch) -> Any:
        loss = evaluate(parts, loss_fn, params, buffers, batch, lambda _: None).loss
        return loss.total, loss.weight

    given = weights, buffers, batch
    program = opened(jax.make_jaxpr(run)(*given), jax.tree.leaves(given)).jaxpr
    names = list(flatten(weights))
    lengths = {names[at]: n for at, n in looped_inputs(program).items() if at < len(names)}
    found: dict[Keys, int] = {}
    for keys in sorted(modules, key=len):
        below = {lengths.get(leaf) for leaf in names if leaf[: len(keys)] == keys}
        length = below.pop() if len(below) == 1 else None
        if length is not None and not any(keys[:end] in found for end in range(len(keys))):
            found[keys] = length
    return found


def calls_in(
    parts: ModelParts, loss_fn: LossFn, blocks: Sequence[Keys], stacks: Stacks, batch: Batch
) -> Calls:
    """The calls of blocks in the loss of a batch, on one device and without any array.

    Args:
        parts: the model's structure, and the shapes of its parameters and buffers.
        loss_fn: the user's loss.
        blocks: the keys of the blocks.
        stacks: the modules of the model that hold many blocks.
        batch: arrays or shapes, with what samples have in common unwrapped.

    Returns:
        The calls.
    """
    modules, looped = unit_paths(blocks, stacks)

    def mark(model: nnx.Module) -> None:
        mark_units(model, lambda path, _: path in modules, looped=looped)

    def run(params: PyTree, buffers: PyTree, batch: Batch) -> Outcome:
        return evaluate(parts, loss_fn, params, buffers, batch, mark)

    # What samples have in common stands in the batch itself here, as the loss sees it.
    weights, buffers = dataclasses.replace(parts, shared={}).arguments

    def as_it_is(forward):
        return forward

    trace = traced(run, as_it_is, stacks, stacks.apart(weights), buffers, batch)
    block_of = {
        variable: number
        for keys, variable in trace.params.items()
        for number, block in enumerate(blocks)
        if keys[: len(block)] == block
    }
    return Calls.of(trace.jaxpr, trace.calls, block_of)
