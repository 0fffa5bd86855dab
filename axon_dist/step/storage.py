"""How a state stores the parameters: as the model has them, or in rows for a pipeline's stages.

A pipeline cuts the program of the loss. Stages get the blocks in the model's order; where the calls
of the loss do not fit it, in the order of the calls.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.errors import UnsupportedError
from ..core.modules import bridges_of, stacks_of
from ..core.renamed import renamed_fields
from ..core.tree import combine, leaves_with_paths, map_with_path, partition
from ..core.typing import Array, Batch, Function, Keys, LossFn, Path, PyTree
from ..core.weighted import Weighted
from ..ir.linen import linen_blocks, linen_modules, looped_inputs
from ..ir.rows import Stacked, by_rows, whole
from ..ir.units import mark_units, names_of
from ..ops.int8 import Int8Form, narrowed, widened
from ..parallel import PipelinePlan, Strategy
from ..pipeline import (
    PASS_A_BATCH,
    ByStages,
    Calls,
    LossTrace,
    OfBlocks,
    Stacks,
    Stages,
    StageStorage,
    buffers_together,
    flatten,
    has_split,
    stages_by_calls,
    trace_loss,
)
from ..sharding import InPlaceOf, Policy
from ..sharding.padding import unpad
from .model_spec import ModelSpec
from .objective import Outcome, evaluate, shard_metrics, wide_pair

CONTAINERS: tuple[type[Any], ...] = (nnx.List, nnx.Dict)
"""Modules that only contain others and are never called."""


@renamed_fields(rows="stage_storage")
@dataclasses.dataclass(frozen=True)
class ParamStorage:
    """How a state stores parameters, and the strategy that shards them.

    Args:
        strategy: its policies are about stored leaves.
        stage_storage: the storage by stages of a pipeline; None without one.
        stacks: the stacked modules of the model, which a pipeline splits into layers first.
        frozen: the paths of the stored leaves that the optimizer does not train; empty with a
            pipeline.
        int8: the form of the parameters that the state keeps in eight bits, by path.
        shapes: the shapes of stored parameters, trained and frozen, without padding.
    """

    strategy: Strategy
    stage_storage: StageStorage | None = None
    stacks: Stacks = Stacks()
    frozen: frozenset[Path] = frozenset()
    int8: Mapping[Path, Int8Form] = dataclasses.field(default_factory=dict)
    shapes: PyTree = dataclasses.field(default_factory=dict)

    @property
    def rows_hold_chunks(self) -> bool:
        """Whether rows of a pipeline hold whole chunks, because its blocks differ."""
        return self.stage_storage is not None and not self.stage_storage.by_blocks

    def from_model(self, params: PyTree) -> PyTree:
        """Converts the nested dict of the model to the stored form.

        A pipeline takes and returns the trained parameters only.
        """
        if self.stage_storage is not None:
            return self.stage_storage.trained.from_model(self.stacks.unstack(params))
        return narrowed(params, self.int8) if self.int8 else params

    def to_model(self, stored: PyTree) -> PyTree:
        """The exact inverse of `from_model`; takes padded arrays too."""
        stored = self._without_padding(stored)
        if self.stage_storage is not None:
            return self.stacks.restack(self.stage_storage.trained.to_model(stored))
        return widened(stored, self.int8) if self.int8 else stored

    def _without_padding(self, stored: PyTree) -> PyTree:
        """Cuts the padding off, to the shapes that `from_model` makes."""
        shapes = dict(leaves_with_paths(self.shapes))
        return map_with_path(
            lambda path, x: unpad(x, shapes[path].shape) if path in shapes else x, stored
        )

    def store(self, weights: PyTree) -> tuple[PyTree, PyTree]:
        """Converts a model's trained and frozen parameters to the stored form.

        Args:
            weights: the model's nested dict of both.

        Returns:
            The stored trained parameters, and the stored frozen parameters.
        """
        if self.stage_storage is not None:
            return self.stage_storage.store(self.stacks.unstack(weights))
        return partition(self.from_model(weights), self.frozen)

    def weights(self, params: PyTree, frozen: PyTree) -> PyTree:
        """Returns the model's nested dict of all parameters; the inverse of `store`."""
        if self.stage_storage is not None:
            return self.stacks.restack(self.stage_storage.restore(params, frozen))
        return self.to_model(combine(params, frozen))

    def forward(self, params: PyTree, frozen: PyTree) -> PyTree:
        """Returns all parameters as a forward pass takes them; int8 weights may stay in int8."""
        return (
            combine(params, frozen) if self.stage_storage is None else self.weights(params, frozen)
        )


def storage_of(
    model_spec: ModelSpec,
    strategy: Strategy,
    loss_fn: LossFn | None = None,
    batch: Batch | None = None,
) -> ParamStorage:
    """Returns the storage that a strategy needs.

    Args:
        model_spec: the model's structure, and the shapes of its parameters and buffers.
        strategy: its pipeline cuts the model; without one the state has the model's own dict.
        loss_fn: the user's loss, in which a pipeline finds the calls of blocks.
        batch: a batch for it, as the loss sees it, arrays or shapes; None if no batch is known.

    Returns:
        The storage.

    Raises:
        UnsupportedError: when the model has fewer blocks, or calls of blocks in sequence, than the
            pipeline has stages, or int8 weights.
        ScheduleError: when the boundaries or costs of stages do not fit the blocks.
    """
    pipeline = strategy.pipeline
    if pipeline is None and not model_spec.int8:
        return ParamStorage(strategy, frozen=model_spec.frozen_paths)
    if pipeline is None:
        # The int8 numbers and their scales are sharded like the weights they replace.
        in_place = InPlaceOf(
            strategy.params, {path: x.shape for path, x in model_spec.int8.items()}
        )
        frozen = frozenset(path for path, _ in leaves_with_paths(model_spec.stored_frozen))
        strategy = dataclasses.replace(strategy, params=in_place)
        return ParamStorage(strategy, frozen=frozen, int8=model_spec.int8)
    if model_spec.int8:
        raise UnsupportedError(
            f"frozen_dtype='int8' and a pipeline over {pipeline.axis!r}: its stages would "
            "keep the widened weights of all their blocks in addition to the int8 weights for the "
            "whole schedule, which takes more memory than bfloat16. Use frozen_dtype='bfloat16', "
            "or fsdp",
            code="int8-pipeline",
        )
    stages, stacks = _stages(model_spec, pipeline, loss_fn, batch)
    shapes = stacks.unstack(model_spec.weights)
    paths = {keys: "/".join(map(str, stacks.in_model(keys))) for keys in flatten(shapes)}
    frozen = frozenset(keys for keys, path in paths.items() if path in model_spec.frozen_paths)
    by_stages = StageStorage(stages, shapes, frozen)
    storages = filter(None, (by_stages, by_stages.trained, by_stages.untrained))
    row_paths = frozenset("/".join(map(str, keys)) for part in storages for keys in part.row_keys)

    def staged(policy: Policy) -> ByStages:
        return ByStages(
            OfBlocks(policy, stacks) if stacks.counts else policy, pipeline.axis, row_paths
        )

    strategy = dataclasses.replace(
        strategy, params=staged(strategy.params), opt_state=staged(strategy.opt_state)
    )
    return ParamStorage(strategy, by_stages, stacks)


def _stages(
    model_spec: ModelSpec, pipeline: PipelinePlan, loss_fn: LossFn | None, batch: Batch | None
) -> tuple[Stages, Stacks]:
    model = model_spec.abstract
    loops = {} if loss_fn is None or batch is None else loops_in(model_spec, loss_fn, batch)
    blocks = tuple(block_keys(model, pipeline.classes, loops))
    stacked = {**_stacked(model), **loops}
    stacks = Stacks(tuple(item for item in stacked.items() if (*item[0], 0) in blocks))
    calls = None
    if loss_fn is not None and batch is not None and blocks:
        calls = calls_in(model_spec, loss_fn, blocks, stacks, batch)
    leaves = flatten(stacks.unstack(model_spec.weights))
    owners = {_owner(keys, blocks) for keys in leaves} - {None}
    # Stages in model order are right if the calls fit them. They are also taken if a block with
    # parameters is never called: the stages then refuse it.
    if calls is None or _fits(calls, blocks, pipeline) or not calls.called.issuperset(owners):
        if len(blocks) < pipeline.schedule.num_stages:
            raise _too_few(model, pipeline, blocks)
        table = pipeline.schedule
        boundaries = table.partition(len(blocks), pipeline.costs, pipeline.boundaries)
        stages = Stages(blocks, boundaries, table.placement, table.num_devices)
    else:
        stages = stages_by_calls(pipeline.schedule, blocks, calls, _depths(calls, pipeline))
    in_model = {stacks.in_model(keys) for keys in leaves}
    shared = (*stages.shared, *_tied(model_spec.abstract, in_model, blocks))
    return dataclasses.replace(stages, shared=shared), stacks


def _fits(calls: Calls, blocks: Sequence[Keys], pipeline: PipelinePlan) -> bool:
    """Whether blocks may be cut into stages in the order in which the model has them."""
    count = pipeline.schedule.num_stages
    # Boundaries and costs may be about the calls, of which there can be more than blocks.
    planned = pipeline.boundaries[-1:] if pipeline.boundaries else (len(pipeline.costs or blocks),)
    if len(blocks) < count or planned != (len(blocks),):
        return False
    ends = itertools.pairwise(
        pipeline.schedule.partition(len(blocks), pipeline.costs, pipeline.boundaries)
    )
    stage_of_block = [stage for stage, (first, end) in enumerate(ends) for _ in range(first, end)]
    return calls.fits(stage_of_block)


def _depths(calls: Calls, pipeline: PipelinePlan) -> tuple[int, ...]:
    """Returns the first depth of each stage, and the number of depths."""
    count = pipeline.schedule.num_stages
    size = max(calls.depths) + 1
    if size < count:
        raise UnsupportedError(
            f"the pipeline has {count} stages, but the longest path through the loss has {size} "
            "calls of blocks in sequence. Use fewer stages",
            code="too-few-calls",
        )
    return pipeline.schedule.partition(size, pipeline.costs, pipeline.boundaries)


def _too_few(model: nnx.Module, pipeline: PipelinePlan, blocks: Sequence[Keys]) -> UnsupportedError:
    kinds = (
        ", ".join(pipeline.classes) or "modules in lists, stacked by nnx.vmap or numbered by Linen"
    )
    repeated = f". Where the loss calls a block several times: {PASS_A_BATCH}" if blocks else ""
    return UnsupportedError(
        f"the pipeline has {pipeline.schedule.num_stages} stages, but the model has {len(blocks)} "
        f"block{'s' * (len(blocks) != 1)} to cut between ({kinds}). Use fewer stages, "
        f"name the class of the blocks among {', '.join(names_of(model))}, or give each "
        f"stage its module: Pipeline.from_modules([...]){repeated}"
    )


def _tied(model: nnx.Module, leaves: Collection[Keys], blocks: Sequence[Keys]) -> list[Keys]:
    """Returns the keys of modules that blocks share with each other or with the rest."""
    tied = []
    for paths in nnx.find_duplicates(model):
        owners = {_owner(tuple(path), blocks) for path in paths}
        keys = next((tuple(p) for p in paths if any(_is_in(k, [tuple(p)]) for k in leaves)), None)
        # A block that occurs in two places is one block that is called twice.
        if keys is not None and keys not in blocks and len(owners) > 1:
            tied.append(keys)
    return tied


def _owner(keys: Keys, blocks: Sequence[Keys]) -> int | None:
    """Returns the index of the block that contains a leaf or module, if any."""
    return next((n for n, block in enumerate(blocks) if _is_in(keys, [block])), None)


def block_keys(
    model: nnx.Module,
    classes: tuple[str, ...] = (),
    loops: Mapping[Keys, int] = MappingProxyType({}),
) -> list[Keys]:
    """Returns the keys of the modules that a pipeline may cut between, in the order of the model.

    Args:
        model: any model; its leaves may be shapes.
        classes: names of the block classes, or of modules within bridged Linen ones, without their
            numbers. Without any, the blocks are the modules with parameters that the model keeps in
            lists (in the innermost lists, if these are nested); the layers of stacked modules,
            which are numbered like those of a list; and the blocks that bridged Linen modules
            repeat.
        loops: the modules within bridged Linen ones that stack layers, and their numbers of layers.

    Returns:
        The keys; no block lies inside another.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.relu)
        >>> block_keys(model)
        [('layers', 0)]
    """
    outermost: list[Keys] = []
    stacks = {**_stacked(model), **loops}
    for keys, module in sorted(nnx.iter_modules(model), key=lambda item: len(item[0])):
        # A list inside a list is not a block itself. Lists inside a block are visited after it, and
        # so are not outermost.
        is_listed = bool(keys) and isinstance(keys[-1], int) and not isinstance(module, CONTAINERS)
        has_params = is_listed and jax.tree.leaves(nnx.state(module, nnx.Param))
        is_listed_block = has_params or keys in stacks
        is_block = type(module).__name__ in classes if classes else is_listed_block
        if is_block and not _is_in(keys, outermost):
            outermost.append(keys)
    in_linen: Iterable[Keys] = loops
    if classes or not loops:
        bridges = bridges_of(model)
        in_linen = [
            prefix + keys for prefix, bridge in bridges for keys in linen_blocks(bridge, classes)
        ]
    # Shorter keys first, so that of nested blocks the outermost is taken.
    for keys in sorted(in_linen, key=len):
        if not _is_in(keys, outermost):
            outermost.append(keys)
    blocks = []
    for keys in outermost:
        layers = [(*keys, row) for row in range(stacks.get(keys, 0))]
        blocks += layers if keys in stacks else [keys]
    return sorted(blocks, key=lambda keys: [_counted(key) for key in keys])


def _is_in(keys: Keys, outer: Collection[Keys]) -> bool:
    """Whether keys are those of, or inside, one of the outer modules."""
    return any(keys[:end] in outer for end in range(len(keys) + 1))


def _stacked(model: nnx.Module) -> dict[Keys, int]:
    """Returns the keys of the stacked modules of a model, and the number of layers in each."""
    paths = stacks_of(model)
    by_path = {"/".join(map(str, keys)): keys for keys, _ in nnx.iter_modules(model)}
    return {by_path[path]: count for path, count in paths.items()}


def _counted(key: str | int) -> tuple[bool, list[str | int]]:
    """A sort key that orders names by the numbers in them: `layer_2` before `layer_10`.

    A decoder comes after an encoder, because it reads the encoder's results.
    """
    parts = re.split(r"(\d+)", re.sub("(?i)decoder", "encoder~", str(key)))
    return isinstance(key, str), [int(part) if part.isdigit() else part for part in parts]


def traced(
    run: Callable[[PyTree, PyTree, Batch], Outcome],
    rewritten: Callable[[Function], Function] | None,
    stacks: Stacks,
    params: PyTree,
    buffers: PyTree,
    batch: Batch,
    num_parts: int = 1,
) -> LossTrace:
    """Traces the loss of a batch, for a model whose stacked blocks are split into layers.

    Args:
        run: (params of the model, buffers, batch) -> outcome, with blocks marked as units.
        rewritten: transforms the function that is traced; None leaves it unchanged.
        stacks: the modules of the model that stack many blocks.
        params: shapes, with stacks split into blocks.
        buffers: arrays or shapes, in the model's form or with stacks split into blocks.
        batch: arrays or shapes.
        num_parts: the number of parts whose sums are added up, of which this batch is one.

    Returns:
        The program.
    """

    def forward(params: PyTree, buffers: PyTree, batch: Batch) -> Any:
        outcome = run(params, buffers, batch)
        loss = wide_pair(outcome.loss)
        return loss.total, loss.weight, _flat(shard_metrics(outcome, num_parts)), outcome.buffers

    program = forward if rewritten is None else rewritten(forward)
    if stacks.counts:
        # The model loops over its stacked blocks, which hides the block that a call reads.
        layers = by_rows(program)

        def of_rows(params: PyTree, buffers: PyTree, batch: Batch) -> Any:
            stacked_params = stacks.restack(params, Stacked)
            stacked_buffers = buffers_together(buffers, Stacked)
            *results, after = layers(stacked_params, stacked_buffers, batch)
            # Return the buffers in the form in which they came.
            after = stacks.split_buffers(after) if has_split(buffers) else after
            return jax.tree.map(whole, (*results, after))

        program = of_rows
    return trace_loss(program, params, buffers, batch)


def _flat(metrics: dict[str, Array | Weighted]) -> dict[tuple[str, str], Array]:
    """Flattens metrics by name and part; metrics with their own weight have two parts."""
    flat: dict[tuple[str, str], Array] = {}
    for name, value in metrics.items():
        if isinstance(value, Weighted):
            flat[name, "total"] = jnp.asarray(value.total)
            flat[name, "weight"] = jnp.asarray(value.weight)
        else:
            flat[name, ""] = value
    return flat


def nested_metrics(flat: dict[tuple[str, str], Array]) -> dict[str, Array | Weighted]:
    """The inverse of `_flat`."""
    alone = {name: value for (name, part), value in flat.items() if not part}
    weighted = {name for name, part in flat if part}
    return {**alone, **{n: Weighted(flat[n, "total"], flat[n, "weight"]) for n in weighted}}


def unit_paths(blocks: Iterable[Keys], stacks: Stacks) -> tuple[frozenset[Path], frozenset[Path]]:
    """Returns the paths of the modules that are called as blocks, and of those that stack them."""
    modules = {stacks.in_model(keys): "/".join(map(str, stacks.in_model(keys))) for keys in blocks}
    stacked_units = frozenset(path for keys, path in modules.items() if stacks.of(keys)[1])
    return frozenset(modules.values()), stacked_units


def loops_in(model_spec: ModelSpec, loss_fn: LossFn, batch: Batch) -> dict[Keys, int]:
    """Finds Linen modules with parameters stacked over the layers that a loop of the loss calls.

    `nn.scan` leaves no other trace in the module: a kernel of three dims may belong to one layer.

    Args:
        model_spec: the model's structure, and the shapes of its parameters and buffers.
        loss_fn: the user's loss.
        batch: arrays or shapes, with `Shared` leaves unwrapped.

    Returns:
        The outermost such modules by keys, and the number of layers in each.
    """
    modules = [keys for keys, _ in linen_modules(model_spec.abstract)]
    if not modules:
        return {}
    weights, buffers = dataclasses.replace(model_spec, shared={}).arguments

    def run(params: PyTree, buffers: PyTree, batch: Batch) -> Any:
        loss = evaluate(model_spec, loss_fn, params, buffers, batch, lambda _: None).loss
        return loss.total, loss.weight

    names = list(flatten(weights))
    inputs = looped_inputs(jax.make_jaxpr(run)(weights, buffers, batch))
    lengths = {names[index]: n for index, n in inputs.items() if index < len(names)}
    loops: dict[Keys, int] = {}
    for keys in sorted(modules, key=len):
        below = {lengths.get(leaf) for leaf in names if leaf[: len(keys)] == keys}
        length = below.pop() if len(below) == 1 else None
        if length is not None and not any(keys[:end] in loops for end in range(len(keys))):
            loops[keys] = length
    return loops


def calls_in(
    model_spec: ModelSpec, loss_fn: LossFn, blocks: Sequence[Keys], stacks: Stacks, batch: Batch
) -> Calls:
    """Finds the calls of blocks in the loss of a batch, by tracing it for one device.

    Args:
        model_spec: the model's structure, and the shapes of its parameters and buffers.
        loss_fn: the user's loss.
        blocks: the keys of the blocks.
        stacks: the modules of the model that stack many blocks.
        batch: arrays or shapes, with `Shared` leaves unwrapped.

    Returns:
        The calls.
    """
    modules, stacked_units = unit_paths(blocks, stacks)

    def mark(model: nnx.Module) -> None:
        mark_units(model, lambda path, _: path in modules, stacked_units=stacked_units)

    def run(params: PyTree, buffers: PyTree, batch: Batch) -> Outcome:
        return evaluate(model_spec, loss_fn, params, buffers, batch, mark)

    # Here the shared leaves are in the batch itself, as the loss sees it.
    weights, buffers = dataclasses.replace(model_spec, shared={}).arguments

    trace = traced(run, None, stacks, stacks.unstack(weights), buffers, batch)
    block_of = {
        variable: number
        for keys, variable in trace.params.items()
        for number, block in enumerate(blocks)
        if keys[: len(block)] == block
    }
    return Calls.of(trace.jaxpr, trace.calls, block_of)
