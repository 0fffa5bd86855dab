"""The rules by which `build_train_step` refuses a step, checked before any array exists."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.errors import Requirement, StrategyConflictError, UnsupportedError, check_all
from ..core.tree import leaves_with_paths
from ..core.typing import Path, PyTree
from ..core.words import AUTO
from ..ir.elementwise import mixing_in
from ..ir.linen import linen_modules
from ..ops.fp8 import Fp8Layers
from ..parallel import STRATEGY_RULES, check_sums, has_experts
from ..sharding import Policy, spec_axes
from .evaluation import check_eval_kwargs
from .plan import StepPlan, plan_step, units_of_step
from .replicas import Outer
from .separation import rank_requirements
from .spec import StepSpec
from .statistics import statistics_outside_batch_norm, warn_of_statistics

Found = Mapping[str, Any] | None


def _microbatches(spec: StepSpec) -> Found:
    accumulate = spec.options.accumulate
    count = spec.num_microbatches
    return {"accumulate": accumulate, "count": count} if accumulate != count else None


def _layers(spec: StepSpec) -> None:
    strategy = spec.strategy
    for layers in strategy.layers:
        layers.check(spec.model_spec.abstract, strategy.layout(spec.world.mesh))


def _ungathered(spec: StepSpec) -> Found:
    strategy = spec.strategy
    reduction = spec.reduction
    if strategy.pipeline is not None:
        return None
    without_experts = dataclasses.replace(strategy, ungathered_axes=())
    is_local, asked = rank_requirements(dataclasses.replace(spec, strategy=without_experts))
    if not is_local:
        return None
    per = f"a reduction per {reduction.per!r} of {spec.num_microbatches} microbatches"
    return {"axis": strategy.ungathered_axes[0], "asked": " and ".join(asked) or per}


def _statistics(spec: StepSpec) -> Found:
    if not spec.reduction.sync_buffers:
        return None
    _, asked = rank_requirements(spec)
    if spec.options.separable:
        asked = [*asked, "separable=True"]
    statistics = statistics_outside_batch_norm(spec.model_spec.abstract)
    # If nothing asks for per-rank computation, such a model runs in global view.
    return {"path": statistics[0], "asked": " and ".join(asked)} if statistics and asked else None


def _loops(spec: StepSpec) -> Found:
    options = spec.options
    strategy = spec.strategy
    is_unroll = options.unroll is not None
    name = "unroll" if is_unroll else "scan_layers"
    value = options.unroll if is_unroll else options.scan_layers
    facts = {"name": name, "value": value, "strategy": f"strategy {strategy.name!r}"}
    unrolls = options.unroll > 1 if options.unroll is not None else options.scan_layers is False
    if strategy.pipeline is not None:
        return {**facts, "why": "runs the blocks of its stages one after another as they are"}
    if is_unroll and not units_of_step(spec):
        return {**facts, "why": "neither splits nor recomputes blocks, and runs none as a loop"}
    if unrolls and strategy.remat is not None and strategy.remat.interval != 1:
        interval = strategy.remat.interval
        return {**facts, "why": f"recomputes groups of interval={interval!r}, which are a loop"}
    if is_unroll:
        return None
    stacks = sorted(spec.model_spec.stacks)
    model = {**facts, "strategy": "the model"}
    if unrolls and stacks:
        return {**model, "why": f"keeps the blocks of {stacks[0]!r} stacked, and loops over them"}
    if options.scan_layers is True and not units_of_step(spec):
        return {**model, "why": "repeats no blocks"}
    return None


def _stops_replicas(spec: StepSpec) -> Found:
    outer_loop = spec.strategy.outer_loop
    policy = spec.options.nonfinite
    if outer_loop is None or policy is None or not policy.holds:
        return None
    return {"axis": outer_loop.axis, "policy": policy.value}


def _ema_of_replicas(spec: StepSpec) -> Found:
    outer_loop = spec.strategy.outer_loop
    ema = spec.options.ema
    return None if outer_loop is None or ema is None else {"axis": outer_loop.axis, "ema": ema}


Obstacle: TypeAlias = tuple[str, str] | None
"""(why it is impossible, what to do), or None if it is possible."""


def _elastic_obstacle(spec: StepSpec) -> dict[str, str] | None:
    """Says why a step cannot be bitwise independent of the number of ranks, and what to do."""
    for find in (_of_strategy, _of_counts, _of_sums):
        found = find(spec)
        if found is not None:
            why, what = found
            return {"why": why, "what": what}
    return None


def _of_strategy(spec: StepSpec) -> Obstacle:
    strategy = spec.strategy
    supported = "ddp, zero and fsdp, alone or composed"
    if strategy.outer_loop is not None:
        return (
            f"replicas over {strategy.outer_loop.axis!r} train each on its own samples, so their "
            "number is part of the algorithm",
            f"use {supported}",
        )
    if strategy.pipeline is not None:
        return (
            f"a pipeline over {strategy.pipeline.axis!r} adds up microbatches in the order of its "
            "schedule",
            f"use {supported}",
        )
    if strategy.layers or strategy.ungathered_axes:
        return (
            f"strategy {strategy.name!r} splits sums within a sample over ranks, as tensor, "
            "context and expert parallelism do, and the order of these sums depends on the number "
            "of ranks",
            f"use {supported}",
        )
    if math.prod(spec.mesh.shape[axis] for axis in strategy.batch_axes) != spec.mesh.size:
        return (
            f"the mesh is {dict(spec.mesh.shape)}, but strategy {strategy.name!r} splits samples "
            f"over {', '.join(strategy.batch_axes) or 'no axis'} alone",
            f"leave the other axes out of the mesh, and use {supported}",
        )
    return None


def _of_counts(spec: StepSpec) -> Obstacle:
    ranks = spec.mesh.size
    accumulate = spec.options.accumulate
    shards = spec.num_ranks
    if shards % (ranks * accumulate):
        parts = f"{ranks} ranks" + f" x accumulate={accumulate}" * (accumulate > 1)
        return (
            f"logical_shards={shards} do not divide over {parts}, each of which adds up a "
            "whole subtree of the binary tree in which the shards are summed",
            f"use a power of two of ranks and microbatches, up to {shards} together",
        )
    if spec.options.pad is not None:
        return (
            f"pad={spec.options.pad!r} pads the rows of each process, so the shards depend on how "
            "many processes there are",
            "leave pad out, and give batches that are a multiple of logical_shards",
        )
    return None


def _of_sums(spec: StepSpec) -> Obstacle:
    reduction = spec.reduction
    precision = spec.strategy.precision
    if precision is not None and precision.products is not None:
        return (
            "products in fp8 take their scales from the samples of all ranks",
            'use MixedPrecision(compute="bfloat16", reduce="float32")',
        )
    if reduction.is_grouped or not reduction.sync_buffers:
        return (
            f"bucket_capacity={reduction.bucket_capacity}, sync={reduction.sync.name} and "
            f"broadcast_buffers={reduction.sync_buffers} set how ranks reduce, "
            "but elastic steps sum in a fixed binary tree over the logical shards",
            "leave all three out",
        )
    if reduction.dtype is not None and jnp.finfo(reduction.dtype).bits < _WIDE:
        return (
            f"gradients are sent in {jnp.dtype(reduction.dtype).name}, and are then rounded "
            "between ranks but not between the shards of a rank",
            'reduce in float32: ddp(reduce_dtype="float32"), or '
            'MixedPrecision(compute="bfloat16", reduce="float32")',
        )
    return None


_WIDE = 32
"""Bits of the floats that the tree adds up."""


_ELASTIC = 'deterministic="elastic" is not possible here: {why}; {what}, or use deterministic=True'

ELASTIC_BITS = Requirement.row(
    "elastic steps use only supported options",
    UnsupportedError,
    _ELASTIC,
    lambda spec: _elastic_obstacle(spec) if spec.options.is_elastic else None,
    code="elastic-not-possible",
)

RULES: tuple[Requirement[StepSpec], ...] = (
    Requirement("options have possible values", lambda spec: spec.options.validate()),
    *STRATEGY_RULES,
    ELASTIC_BITS,
    Requirement.row(
        "there are blocks to unroll",
        StrategyConflictError,
        "{name}={value} says which blocks are unrolled rather than run by a loop, but {strategy} "
        "{why}; leave {name} out",
        lambda spec: (
            None
            if spec.options.unroll is None and spec.options.scan_layers == AUTO
            else _loops(spec)
        ),
        code="nothing-to-unroll",
    ),
    Requirement(
        "remat policy 'sums' needs sums to keep",
        lambda spec: spec.strategy.remat and check_sums(spec.strategy, spec.model_spec.abstract),
    ),
    Requirement("layers can be changed", lambda spec: spec.strategy.layers and _layers(spec)),
    Requirement(
        "the model's call takes what evaluations give it",
        lambda spec: (
            spec.options.eval_kwargs
            and check_eval_kwargs(spec.model_spec.abstract, spec.options.eval_kwargs)
        ),
    ),
    Requirement.row(
        "the compiler reduces the gradients of experts",
        UnsupportedError,
        "parameters are split along {axis!r} and the samples of all its ranks are sent to them, so "
        "no rank holds gradients of its own samples alone, which {asked} needs. Remove {asked}; "
        "gradients are then reduced after every microbatch, in the compute dtype",
        lambda spec: _ungathered(spec) if spec.strategy.ungathered_axes else None,
        code="experts-and-ranks",
    ),
    Requirement.row(
        "statistics can be averaged over ranks",
        UnsupportedError,
        "{path} holds batch statistics outside nnx.BatchNorm (a bridged Linen BatchNorm's, for "
        "example), which cannot be averaged over the ranks from outside, as {asked} would need. "
        "Use nnx.BatchNorm, or leave that out",
        lambda spec: _statistics(spec) if spec.wants_local_view else None,
        code="statistics-not-averaged",
    ),
)
"""The rules for every step, whatever its batch. Rules about the batch are checked by tracing.

Compiler options, stages, staged optimizers and layouts raise where they are built.
"""


PIPELINE_RULES: tuple[Requirement[StepSpec], ...] = (
    Requirement.row(
        "the pipeline sets the number of microbatches",
        StrategyConflictError,
        "accumulate={accumulate}, but the pipeline runs {count} microbatches per step, which is "
        "its accumulation; leave accumulate out, or change num_microbatches",
        lambda spec: None if spec.options.accumulate == 1 else _microbatches(spec),
        code="accumulate-and-pipeline",
    ),
)
"""The additional rules for a pipeline."""


REPLICA_RULES: tuple[Requirement[StepSpec], ...] = (
    ELASTIC_BITS,
    *STRATEGY_RULES,
    Requirement.row(
        "no replica waits for another",
        UnsupportedError,
        "nonfinite={policy!r} freezes the state of all ranks from the first nonfinite step on, "
        "and replicas over axis {axis!r} would have to tell each other on every step; use "
        "nonfinite='skip' (in a config, train: {{nonfinite: skip}}): each replica then skips its "
        "own batch",
        _stops_replicas,
        code="replicas-and-nonfinite",
    ),
    Requirement.row(
        "EMA needs one set of parameters",
        UnsupportedError,
        "ema={ema} averages the parameters of every step, but replicas over axis {axis!r} agree "
        "on their parameters only in an outer step; leave ema out: the outer optimizer averages, "
        "as in diloco(outer=optax.sgd(0.7, momentum=0.9, nesterov=True))",
        _ema_of_replicas,
        code="replicas-and-ema",
    ),
)
"""The rules that are checked on the undivided strategy of a step with several replicas.

They come before `RULES`, which repeats some of them for the strategy of one replica.
"""


def _no_fp8_gather(spec: StepSpec, fp8: Fp8Layers) -> str:
    """Says why no unit can gather weights in fp8 as requested; "" if one can."""
    strategy = spec.strategy
    if strategy.pipeline is not None:
        return f"a pipeline over {strategy.pipeline.axis!r} gathers its stages once a step"
    if strategy.gathers_once:
        return "the parameters are gathered once a step, all of them in the dtype of the compute"
    if not _gathers_any(spec, [f"{layer}/kernel" for layer in fp8.paths]):
        return "no kernel of a layer in fp8 is split over ranks that have other samples"
    if spec.wants_local_view:
        reduction = spec.reduction
        return (
            f"ranks gather explicitly, to reduce gradients per {reduction.per} in {reduction.dtype}"
        )
    return ""


def _gathers_any(spec: StepSpec, paths: Iterable[Path]) -> bool:
    """Whether units gather any of the weights, or would on more devices."""
    strategy = spec.strategy
    mesh = spec.mesh
    axes = {*strategy.reduced_axes} - {*strategy.ungathered_axes}
    splits = axes.intersection(strategy.params.split_axes)
    if splits and all(mesh.shape[axis] == 1 for axis in splits):
        return True
    shardings = (strategy.params(path, spec.model_spec.shapes[path], mesh) for path in paths)
    return any(not axes.isdisjoint(spec_axes(sharding)) for sharding in shardings)


def _fp8_gather(plan: StepPlan, fp8: Fp8Layers) -> Found:
    why = _no_fp8_gather(plan.spec, fp8) if fp8.gathers else ""
    return {"name": plan.spec.strategy.name, "why": why} if why else None


def _matrices(plan: StepPlan) -> Found:
    spec = plan.spec
    # Where rows hold chunks, each rank works on the matrices of its own chunks.
    if spec.mesh.size == 1 or plan.state_plan.storage.rows_hold_chunks:
        return None
    kind = plan.state_plan.update.hidden
    return {"kind": kind, "count": spec.mesh.size} if kind else None


def _mixing_update(plan: StepPlan) -> Found:
    name = mixing_in(plan.state_plan.update.traced.program)
    if name is None:
        return None
    why = (
        f"the optimizer does not work element by element: its {name!r} depends on several elements "
        "of an array, or on their places, and each rank has a part of them"
    )
    what = (
        "use one such as optax.sgd, optax.adam or optax.adamw; for clipping by the global norm use "
        "clip_norm=... of build_train_step, and for the norms of layers its "
        'metrics=("norms_by_layer",); optim.watched would measure the part of each rank alone'
    )
    return {"why": why, "what": what}


def _stage_experts(plan: StepPlan) -> Found:
    spec = plan.spec
    strategy = spec.strategy
    storage = plan.state_plan.storage
    assert storage.stage_storage is not None
    axis = strategy.ungathered_axes[0]

    def split_along_axis(policy: Policy, tree: PyTree) -> list[Path]:
        def is_split(path, leaf):
            return axis in spec_axes(policy(path, leaf.shape, spec.mesh))

        return [path for path, leaf in leaves_with_paths(tree) if is_split(path, leaf)]

    offending = split_along_axis(strategy.params, spec.model_spec.weights)
    place = "in blocks that differ"
    modules = nnx.iter_modules(spec.model_spec.abstract)
    experts = {"/".join(map(str, keys)) for keys, module in modules if has_experts(module)}
    if others := [path for path in offending if path.rpartition("/")[0] not in experts]:
        offending = others
        place = "in a module without the methods mix_experts and feed"
    elif not storage.rows_hold_chunks:
        rows = {"/".join(map(str, keys)) for keys in storage.stage_storage.row_keys}
        paths = [
            *split_along_axis(storage.strategy.params, plan.state_plan.params),
            *split_along_axis(storage.strategy.params, plan.state_plan.frozen),
        ]
        offending = [path for path in paths if path not in rows]
        place = "outside its blocks"
    return {"path": offending[0], "axis": axis, "where": place} if offending else None


def _stage_classes(plan: StepPlan) -> Found:
    spec = plan.spec
    remat = spec.strategy.remat
    rows = plan.state_plan.storage.stage_storage
    if remat is None or not remat.classes:
        return None
    assert rows is not None
    modules = {plan.state_plan.storage.stacks.in_model(block) for block in rows.stages.called}
    model = spec.model_spec.abstract
    named = [(keys, type(module).__name__) for keys, module in nnx.iter_modules(model)]
    named += [(keys, name.rpartition("/")[2]) for keys, name in linen_modules(model)]
    blocks = sorted({name for keys, name in named if keys in modules})
    if {name.rpartition("/")[2] for name in remat.classes} == set(blocks):
        return None
    return {"classes": ", ".join(remat.classes), "blocks": ", ".join(blocks)}


def _fragments(plan: StepPlan) -> Found:
    spec = plan.spec
    outer_loop = spec.strategy.outer_loop
    count = len(jax.tree.leaves(plan.state_plan.params))
    if outer_loop is None or all(Outer(plan).fragments):
        return None
    return {"count": outer_loop.fragments, "params": count, "name": spec.strategy.name}


def _compressed(plan: StepPlan) -> Found:
    spec = plan.spec
    outer_loop = spec.strategy.outer_loop
    leaves = leaves_with_paths(plan.state_plan.params)
    complex_ = next((p for p, x in leaves if jnp.issubdtype(x.dtype, jnp.complexfloating)), None)
    if outer_loop is None or outer_loop.compression is None or complex_ is None:
        return None
    return {"path": complex_, "how": outer_loop.compression}


PLAN_RULES: tuple[Requirement[StepPlan], ...] = (
    Requirement.row(
        "elastic updates work element by element",
        UnsupportedError,
        _ELASTIC,
        lambda plan: _mixing_update(plan) if plan.spec.options.is_elastic else None,
        code="elastic-not-possible",
    ),
    Requirement.row(
        "fp8 gather needs weights sharded per block",
        UnsupportedError,
        "gather='fp8' is for weights that each block gathers where it uses them, but under "
        "strategy {name!r} {why}; leave gather out, or split parameters by fsdp or "
        "hybrid, and leave the reduction of their gradients at its default",
        lambda plan: None if plan.changes.fp8 is None else _fp8_gather(plan, plan.changes.fp8),
        code="fp8-gather-not-possible",
    ),
    Requirement.row(
        "matrices can be distributed",
        UnsupportedError,
        "the optimizer orthogonalises matrices within {kind!r}, where they cannot be distributed "
        "over the {count} devices, so that every device would do all the work. Remove it from the "
        "optimizer; in place of optax.apply_if_finite, pass nonfinite='skip' to build_train_step",
        lambda plan: _matrices(plan) if plan.state_plan.update.needs_matrices else None,
        code="matrices-not-distributed",
    ),
)
"""The rules for what follows from every step: its optimizer and the changes to its model."""


PIPELINE_PLAN_RULES: tuple[Requirement[StepPlan], ...] = (
    Requirement.row(
        "stages have experts in equal blocks",
        UnsupportedError,
        "the pipeline has {path!r} {where}, but experts that tokens are sent to along {axis!r} "
        "must be modules with the methods mix_experts and feed, such as models.Experts, in blocks "
        "with parameters of equal shapes. Leave expert_parallel out, and split the batch by ddp "
        "or fsdp in addition to the pipeline; or leave the pipeline out",
        lambda plan: _stage_experts(plan) if plan.spec.strategy.ungathered_axes else None,
        code="stage-experts",
    ),
    Requirement.row(
        "stages recompute their blocks",
        StrategyConflictError,
        "the stages of a pipeline recompute block by block, here {blocks}, but activation "
        "checkpointing names the classes {classes}; leave the classes out, or give them to the "
        "pipeline: classes=(...)",
        lambda plan: _stage_classes(plan) if plan.spec.strategy.remat else None,
        code="pipeline-and-remat-classes",
    ),
)
"""The additional rules for the stages of a pipeline."""


REPLICA_PLAN_RULES: tuple[Requirement[StepPlan], ...] = (
    Requirement.row(
        "every fragment has parameters",
        StrategyConflictError,
        "strategy {name!r} has fragments={count}, but the model's {params} parameters do not fill "
        "that many of about one size; use fewer",
        _fragments,
        code="too-many-fragments",
    ),
    Requirement.row(
        "compressed parameters are real",
        UnsupportedError,
        "the parameter {path!r} is complex, but {how} compresses real numbers only; leave the "
        "compression out",
        _compressed,
        code="complex-and-compression",
    ),
)
"""The additional rules for the outer steps of several replicas."""


def check_rules(spec: StepSpec) -> None:
    """Raises the error of the first broken rule; warns if statistics are those of a microbatch.

    Args:
        spec: the resolved arguments of the step.

    Raises:
        AxonDistError: of the class that the broken rule has.
    """
    if spec.strategy.outer_loop is not None:
        check_all(REPLICA_RULES, spec)
        spec = spec.replica(region=False)
    check_all(RULES, spec)
    if spec.strategy.pipeline is not None:
        check_all(PIPELINE_RULES, spec)
    if spec.num_microbatches > 1:
        warn_of_statistics(spec.model_spec.abstract, spec.num_microbatches)


def check_plan(plan: StepPlan) -> None:
    """Raises the error of the first broken rule about a plan.

    Args:
        plan: the plan of a step that keeps the rules of `check_rules`.

    Raises:
        AxonDistError: of the class that the broken rule has.
    """
    if plan.spec.strategy.outer_loop is not None:
        check_all(REPLICA_PLAN_RULES, plan)
        plan = plan_step(plan.spec.replica(region=False), plan)
    check_all(PLAN_RULES, plan)
    if plan.spec.strategy.pipeline is not None:
        check_all(PIPELINE_PLAN_RULES, plan)
