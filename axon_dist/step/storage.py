"""How a state holds the parameters: as the model does, or in rows for the stages of a pipeline."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx

from ..core.errors import UnsupportedError
from ..core.modules import stacks_of
from ..core.tree import joined, leaves_with_paths, parted
from ..core.typing import Batch, LossFn, Path, PyTree
from ..jaxpr.linen import linen_blocks, linen_named
from ..jaxpr.units import names_of
from ..ops.int8 import narrowed, widened
from ..parallel import PipelinePlan, Strategy
from ..pipeline import (
    Calls,
    FlatStorage,
    Keys,
    ModelStorage,
    OfBlocks,
    Stacks,
    Staged,
    Stages,
    storage_for,
)
from ..pipeline.layout import flatten
from ..pipeline.switch import BATCH, stages_by_calls
from ..schedule import partition, stage_ranges
from ..sharding import InPlaceOf
from .parts import ModelParts
from .staged_loss import calls_in, loops_in

CONTAINERS: tuple[type[Any], ...] = (nnx.List, nnx.Dict)
"""Modules that nobody calls: they only hold others."""


def _unchanged(params: PyTree) -> PyTree:
    return params


@dataclasses.dataclass(frozen=True)
class Storage:
    """The stored form of parameters, and the strategy that lays it out.

    Args:
        strategy: policies about stored leaves.
        from_model: the model's nested dict -> the stored tree; of what is trained, where there are
            rows.
        to_model: the inverse, exactly.
        rows: the rows of a pipeline; None without one.
        stacks: the modules of the model that a pipeline takes apart first.
        frozen: the paths of the stored leaves that the optimizer leaves alone, where there are no
            rows.
    """

    strategy: Strategy
    from_model: Callable[[PyTree], PyTree] = _unchanged
    to_model: Callable[[PyTree], PyTree] = _unchanged
    rows: ModelStorage | None = None
    stacks: Stacks = Stacks()
    frozen: frozenset[Path] = frozenset()

    @property
    def axis(self) -> str:
        """The axis whose ranks have rows."""
        policy: Any = self.strategy.params
        return policy.axis

    @property
    def is_by_vectors(self) -> bool:
        """Whether stages differ, so that ranks hold vectors of whatever leaves are theirs."""
        return isinstance(self.rows, FlatStorage)

    def store(self, weights: PyTree) -> tuple[PyTree, PyTree]:
        """The stored form of a model's trained and frozen parameters.

        Args:
            weights: the model's nested dict of both.

        Returns:
            The trained ones, and the frozen ones.
        """
        if self.rows is not None:
            return self.rows.store(self.stacks.apart(weights))
        return parted(self.from_model(weights), self.frozen)

    def weights(self, params: PyTree, frozen: PyTree) -> PyTree:
        """The model's nested dict of all parameters; the inverse of `store`."""
        if self.rows is not None:
            return self.stacks.together(self.rows.restore(params, frozen))
        return self.to_model(joined(params, frozen))

    def forward(self, params: PyTree, frozen: PyTree) -> PyTree:
        """All parameters as a forward pass takes them: what is in eight bits may stay so."""
        return joined(params, frozen) if self.rows is None else self.weights(params, frozen)

    def with_state_rows(self, paths: frozenset[Path]) -> Storage:
        """The same, knowing which leaves of the optimizer's state are rows."""
        policy: Any = self.strategy.opt_state
        policy = dataclasses.replace(policy, state_rows=paths)
        return dataclasses.replace(
            self, strategy=dataclasses.replace(self.strategy, opt_state=policy)
        )


def storage_of(
    parts: ModelParts,
    strategy: Strategy,
    loss_fn: LossFn | None = None,
    batch: Batch | None = None,
) -> Storage:
    """The storage that a strategy needs.

    Args:
        parts: the model's structure, and the shapes of its parameters and buffers.
        strategy: its pipeline cuts the model; without one the state holds the model's own dict.
        loss_fn: the user's loss, in which a pipeline finds the calls of blocks.
        batch: for it, as the loss sees it, arrays or shapes; None where no batch is known.

    Returns:
        The storage.

    Raises:
        UnsupportedError: when the model has no blocks to cut between, or they differ.
        ScheduleError: when there are fewer blocks than stages, or the boundaries do not fit.
    """
    if strategy.pipeline is None:
        return _of_model(parts, strategy)
    if parts.int8:
        raise UnsupportedError(
            f"frozen_dtype='int8' and a pipeline over {strategy.pipeline.axis!r}: its stages would "
            "keep the widened weights of all their blocks beside the eight bits for the whole "
            "schedule, which is more than bfloat16 takes. Use frozen_dtype='bfloat16', or fsdp"
        )
    stages, stacks = _stages(parts, strategy.pipeline, loss_fn, batch)
    shapes = stacks.apart(parts.weights)
    paths = {keys: "/".join(map(str, stacks.in_model(keys))) for keys in flatten(shapes)}
    frozen = frozenset(keys for keys, path in paths.items() if path in parts.frozen_paths)
    rows = storage_for(stages, shapes, frozen)
    return Storage(
        _staged(strategy, rows, stacks),
        lambda params: rows.trained.from_model(stacks.apart(params)),
        lambda stored: stacks.together(rows.trained.to_model(stored)),
        rows,
        stacks,
    )


def _of_model(parts: ModelParts, strategy: Strategy) -> Storage:
    """The model's own dict; what is kept in eight bits lies as the weights would."""
    if not parts.int8:
        return Storage(strategy, frozen=parts.frozen_paths)
    shapes = {path: form.shape for path, form in parts.int8.items()}
    return Storage(
        dataclasses.replace(strategy, params=InPlaceOf(strategy.params, shapes)),
        lambda weights: narrowed(weights, parts.int8),
        lambda stored: widened(stored, parts.int8),
        frozen=frozenset(path for path, _ in leaves_with_paths(parts.kept)),
    )


def _stages(
    parts: ModelParts, plan: PipelinePlan, loss_fn: LossFn | None, batch: Batch | None
) -> tuple[Stages, Stacks]:
    model, count = parts.abstract, plan.schedule.num_stages
    loops = {} if loss_fn is None or batch is None else loops_in(parts, loss_fn, batch)
    blocks = tuple(block_keys(model, plan.classes, loops))
    stacked = {**_stacked(model), **loops}
    stacks = Stacks(tuple(item for item in stacked.items() if (*item[0], 0) in blocks))
    calls = None
    if loss_fn is not None and batch is not None and blocks:
        calls = calls_in(parts, loss_fn, blocks, stacks, batch)
    if calls is None or _fits(calls, blocks, plan) or _hides(calls, parts, stacks, blocks):
        _check_enough(model, plan, blocks)
        boundaries = partition(len(blocks), count, plan.costs, plan.boundaries)
        stages = Stages.of(plan.schedule, blocks, boundaries)
    else:
        stages = stages_by_calls(plan.schedule, blocks, calls, _depths(calls, plan))
    shared = (*stages.shared, *_tied(parts, stacks, blocks))
    return dataclasses.replace(stages, shared=shared), stacks


def _hides(calls: Calls, parts: ModelParts, stacks: Stacks, blocks: Sequence[Keys]) -> bool:
    """Whether a block with parameters of its own has no call, which the stages will refuse."""
    leaves = _leaves(parts, stacks)
    own = {_owner(keys, blocks) for keys in leaves} - {None}
    return not calls.called.issuperset(own)


def _leaves(parts: ModelParts, stacks: Stacks) -> dict[Keys, Any]:
    return flatten(stacks.apart(parts.weights))


def _fits(calls: Calls, blocks: Sequence[Keys], plan: PipelinePlan) -> bool:
    """Whether blocks may be cut in the order in which the model holds them."""
    count = plan.schedule.num_stages
    # Boundaries and costs may be about the calls, of which there are more than blocks.
    said = plan.boundaries[-1:] if plan.boundaries else (len(plan.costs or blocks),)
    if len(blocks) < count or said != (len(blocks),):
        return False
    ranges = stage_ranges(partition(len(blocks), count, plan.costs, plan.boundaries))
    return calls.fits([stage for stage, numbers in enumerate(ranges) for _ in numbers])


def _depths(calls: Calls, plan: PipelinePlan) -> tuple[int, ...]:
    """The first depth of each stage, and the number of depths."""
    count, size = plan.schedule.num_stages, max(calls.depths) + 1
    if size < count:
        raise UnsupportedError(
            f"the pipeline has {count} stages, and the longest way through the loss has {size} "
            "calls of blocks, one behind another. Use fewer stages"
        )
    return partition(size, count, plan.costs, plan.boundaries)


def _check_enough(model: nnx.Module, plan: PipelinePlan, blocks: Sequence[Keys]) -> None:
    if len(blocks) >= plan.schedule.num_stages:
        return
    where = ", ".join(plan.classes) or "modules in lists, stacked by nnx.vmap or numbered by Linen"
    repeated = f". Where the loss calls a block several times: {BATCH}" if blocks else ""
    raise UnsupportedError(
        f"the pipeline has {plan.schedule.num_stages} stages, and the model has {len(blocks)} "
        f"block{'s' * (len(blocks) != 1)} to cut between ({where}). Use fewer stages, "
        f"name the class of the blocks among {', '.join(names_of(model))}, or give each "
        f"stage its module: Pipeline.from_modules([...]){repeated}"
    )


def _tied(parts: ModelParts, stacks: Stacks, blocks: Sequence[Keys]) -> list[Keys]:
    """The keys of what several blocks have in common, or a block with what is in none."""
    held = {stacks.in_model(keys) for keys in _leaves(parts, stacks)}
    found = []
    for paths in nnx.find_duplicates(parts.abstract):
        own = [_owner(tuple(path), blocks) for path in paths]
        keys = next((tuple(p) for p in paths if any(_is_in(k, [tuple(p)]) for k in held)), None)
        # A block that is held twice is one block, called twice.
        is_block = keys in blocks
        if keys is not None and not is_block and (len(set(own)) > 1):
            found.append(keys)
    return found


def _owner(keys: Keys, blocks: Sequence[Keys]) -> int | None:
    return next((n for n, block in enumerate(blocks) if _is_in(keys, [block])), None)


def block_keys(
    model: nnx.Module,
    classes: tuple[str, ...] = (),
    loops: Mapping[Keys, int] = MappingProxyType({}),
) -> list[Keys]:
    """The keys of the modules that a pipeline may cut between, in the order of the model.

    Args:
        model: any; its leaves may be shapes.
        classes: names of the block classes, or of modules within bridged Linen ones, without their
            numbers; none takes the modules that the model keeps in lists and that have parameters;
            of lists in lists, the modules in the innermost ones; the layers of stacked modules,
            which are numbered as those of a list are; and the blocks that bridged Linen modules
            repeat.
        loops: the modules within bridged Linen ones that stack layers, and how many.

    Returns:
        Keys, nothing inside a block being one.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.relu)
        >>> block_keys(model)
        [('layers', 0)]
    """
    found: dict[Keys, None] = {}
    stacks = {**_stacked(model), **loops}
    for keys, module in sorted(nnx.iter_modules(model), key=lambda item: len(item[0])):
        # A list in a list only holds blocks; what a block holds in lists is found after the block.
        listed = bool(keys) and isinstance(keys[-1], int) and not isinstance(module, CONTAINERS)
        listed = (listed and _has_params(module)) or keys in stacks
        chosen = type(module).__name__ in classes if classes else listed
        if chosen and not _is_in(keys, found):
            found[keys] = None
    in_linen = loops if loops and not classes else _in_linen(model, classes)
    found |= dict.fromkeys(k for k in in_linen if not _is_in(k, found))

    def layers(keys):
        return [(*keys, row) for row in range(stacks[keys])]

    blocks = [b for keys in found for b in (layers(keys) if keys in stacks else [keys])]
    return sorted(blocks, key=lambda keys: [_counted(key) for key in keys])


def _in_linen(model: nnx.Module, classes: tuple[str, ...]) -> list[Keys]:
    """The blocks within the bridged Linen modules of a model, the outermost of those named."""
    found: dict[Keys, None] = {}
    named = linen_named(model, classes) if classes else linen_blocks(model)
    for keys in sorted(named, key=len):
        if not _is_in(keys, found):
            found[keys] = None
    return list(found)


def _is_in(keys: Keys, outer: Collection[Keys]) -> bool:
    return any(keys[:end] in outer for end in range(len(keys) + 1))


def _stacked(model: nnx.Module) -> dict[Keys, int]:
    """The keys of the stacked modules of a model, and how many layers each holds."""
    paths = stacks_of(model)
    by_path = {"/".join(map(str, keys)): keys for keys, _ in nnx.iter_modules(model)}
    return {by_path[path]: count for path, count in paths.items()}


def _counted(key: str | int) -> tuple[bool, list[str | int]]:
    """Sorts names by the numbers in them: `layer_2` stands before `layer_10`.

    A decoder stands behind an encoder, whose results it reads.
    """
    parts = re.split(r"(\d+)", re.sub("(?i)decoder", "encoder~", str(key)))
    return isinstance(key, str), [int(part) if part.isdigit() else part for part in parts]


def _has_params(module: nnx.Module) -> bool:
    return bool(jax.tree.leaves(nnx.state(module, nnx.Param)))


def _staged(strategy: Strategy, rows: ModelStorage, stacks: Stacks) -> Strategy:
    plan: Any = strategy.pipeline
    held = {*rows.row_keys, *rows.trained.row_keys, *rows.untrained.row_keys}
    of_rows = frozenset("/".join(map(str, keys)) for keys in held)

    def of_blocks(policy):
        return OfBlocks(policy, stacks) if stacks.depths else policy

    def wrap(policy):
        return Staged(of_blocks(policy), plan.axis, of_rows)

    return dataclasses.replace(
        strategy,
        params=wrap(strategy.params),
        opt_state=wrap(strategy.opt_state),
    )
