"""The rules by which `build_train_step` refuses a step, checked before any array exists."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.errors import Requirement, StrategyConflictError, UnsupportedError, check_all
from ..core.tree import leaves_with_paths
from ..core.typing import Path, PyTree
from ..ir.linen import linen_modules
from ..ops.fp8 import Fp8Layers
from ..parallel import STRATEGY_RULES, check_sums, has_experts
from ..sharding import Policy, spec_axes
from .elastic import obstacle
from .gather import no_fp8_gather
from .global_view import check_eval_kwargs
from .model_changes import own_statistics, warn_of_statistics
from .options import AUTO
from .replicas import Outer
from .separable import wants_ranks
from .spec import StepSpec

Found = Mapping[str, Any] | None


def _microbatches(spec: StepSpec) -> Found:
    accumulate = spec.options.accumulate
    count = spec.num_microbatches
    return {"accumulate": accumulate, "count": count} if accumulate != count else None


def _layers(spec: StepSpec) -> None:
    strategy = spec.strategy
    for layers in strategy.layers:
        layers.check(spec.parts.abstract, strategy.layout(spec.world.mesh))


def _residents(spec: StepSpec) -> Found:
    strategy = spec.strategy
    reduction = spec.reduction
    if strategy.pipeline is not None:
        return None
    without_experts = dataclasses.replace(strategy, resident=())
    is_local, asked = wants_ranks(dataclasses.replace(spec, strategy=without_experts))
    if not is_local:
        return None
    per = f"a reduction per {reduction.per!r} of {spec.num_microbatches} microbatches"
    return {"axis": strategy.resident[0], "asked": " and ".join(asked) or per}


def _stage_experts(spec: StepSpec) -> Found:
    strategy = spec.strategy
    storage = spec.stored.storage
    assert storage.rows is not None
    axis = strategy.resident[0]

    def split_along_axis(policy: Policy, tree: PyTree) -> list[Path]:
        def is_split(path, leaf):
            return axis in spec_axes(policy(path, leaf.shape, spec.mesh))

        return [path for path, leaf in leaves_with_paths(tree) if is_split(path, leaf)]

    offending = split_along_axis(strategy.params, spec.parts.weights)
    place = "in blocks that differ"
    modules = nnx.iter_modules(spec.parts.abstract)
    experts = {"/".join(map(str, keys)) for keys, module in modules if has_experts(module)}
    if others := [path for path in offending if path.rpartition("/")[0] not in experts]:
        offending = others
        place = "in a module without the methods mix_experts and feed"
    elif not storage.is_by_vectors:
        rows = {"/".join(map(str, keys)) for keys in storage.rows.row_keys}
        paths = [
            *split_along_axis(storage.strategy.params, spec.stored.params),
            *split_along_axis(storage.strategy.params, spec.stored.frozen),
        ]
        offending = [path for path in paths if path not in rows]
        place = "outside its blocks"
    return {"path": offending[0], "axis": axis, "where": place} if offending else None


def _statistics(spec: StepSpec) -> Found:
    if not spec.reduction.sync_buffers:
        return None
    _, asked = wants_ranks(spec)
    if spec.options.separable:
        asked = [*asked, "separable=True"]
    statistics = own_statistics(spec.parts.abstract)
    # If nothing asks for per-rank computation, such a model runs in global view.
    return {"path": statistics[0], "asked": " and ".join(asked)} if statistics and asked else None


def _stage_classes(spec: StepSpec) -> Found:
    remat = spec.strategy.remat
    rows = spec.stored.storage.rows
    if remat is None or not remat.classes:
        return None
    assert rows is not None
    modules = {spec.stored.storage.stacks.in_model(block) for block in rows.stages.called}
    model = spec.parts.abstract
    named = [(keys, type(module).__name__) for keys, module in nnx.iter_modules(model)]
    named += [(keys, name.rpartition("/")[2]) for keys, name in linen_modules(model)]
    blocks = sorted({name for keys, name in named if keys in modules})
    if {name.rpartition("/")[2] for name in remat.classes} == set(blocks):
        return None
    return {"classes": ", ".join(remat.classes), "blocks": ", ".join(blocks)}


def _fp8_gather(spec: StepSpec, fp8: Fp8Layers) -> Found:
    why = no_fp8_gather(spec, fp8) if fp8.gathers else ""
    return {"name": spec.strategy.name, "why": why} if why else None


def _matrices(spec: StepSpec) -> Found:
    # Stages that differ run in branches of their own, each with its own matrices.
    if spec.mesh.size == 1 or spec.stored.storage.is_by_vectors:
        return None
    kind = spec.stored.update.hidden
    return {"kind": kind, "count": spec.mesh.size} if kind else None


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
    if is_unroll and not spec.changes.units:
        return {**facts, "why": "neither splits nor recomputes blocks, and runs none as a loop"}
    if unrolls and strategy.remat is not None and strategy.remat.interval != 1:
        interval = strategy.remat.interval
        return {**facts, "why": f"recomputes groups of interval={interval!r}, which are a loop"}
    if is_unroll:
        return None
    stacks = sorted(spec.parts.stacks)
    model = {**facts, "strategy": "the model"}
    if unrolls and stacks:
        return {**model, "why": f"keeps the blocks of {stacks[0]!r} stacked, and loops over them"}
    if options.scan_layers is True and not spec.changes.units:
        return {**model, "why": "repeats no blocks"}
    return None


ELASTIC_BITS = Requirement.row(
    "bits do not depend on how many ranks there are",
    UnsupportedError,
    'deterministic="elastic" cannot hold: {why}. To do: {what}; or use deterministic=True',
    lambda spec: obstacle(spec) if spec.options.is_elastic else None,
)

RULES: tuple[Requirement[StepSpec], ...] = (
    Requirement("options have possible values", lambda spec: spec.options.validate()),
    Requirement("the compiler takes its options", lambda spec: spec.compiler_options),
    *STRATEGY_RULES,
    ELASTIC_BITS,
    Requirement.row(
        "there are loops to unroll",
        StrategyConflictError,
        "{name}={value} says which blocks are unrolled rather than run by a loop, and {strategy} "
        "{why}; leave {name} out",
        lambda spec: (
            None
            if spec.options.unroll is None and spec.options.scan_layers == AUTO
            else _loops(spec)
        ),
    ),
    Requirement(
        "remat policy 'sums' needs sums to keep",
        lambda spec: spec.strategy.remat and check_sums(spec.strategy, spec.parts.abstract),
    ),
    Requirement("layers can be changed", lambda spec: spec.strategy.layers and _layers(spec)),
    Requirement(
        "the model's call takes what evaluations give it",
        lambda spec: (
            spec.options.eval_kwargs
            and check_eval_kwargs(spec.parts.abstract, spec.options.eval_kwargs)
        ),
    ),
    Requirement.row(
        "fp8 gather needs weights sharded per block",
        UnsupportedError,
        "gather='fp8' is for weights that each block gathers where it uses them, and under "
        "strategy {name!r} {why}; leave gather out, or split parameters by full_shard or "
        "hybrid_shard, and leave the reduction of their gradients at its default",
        lambda spec: None if spec.changes.fp8 is None else _fp8_gather(spec, spec.changes.fp8),
    ),
    Requirement.row(
        "expert parameters are reduced by the compiler",
        UnsupportedError,
        "parameters are split along {axis!r} and the samples of all its ranks are sent to them, so "
        "no rank holds gradients of its own samples alone, which {asked} needs. Remove it; "
        "gradients are then reduced after every microbatch, in the compute dtype",
        lambda spec: _residents(spec) if spec.strategy.resident else None,
    ),
    Requirement.row(
        "statistics are of the whole batch",
        UnsupportedError,
        "{path} holds batch statistics outside nnx.BatchNorm (a bridged Linen BatchNorm's, for "
        "example), which cannot be averaged over the ranks from outside, as {asked} would need. "
        "Use nnx.BatchNorm, or leave that out",
        lambda spec: _statistics(spec) if spec.is_local else None,
    ),
    Requirement.row(
        "matrices can be distributed",
        UnsupportedError,
        "the optimizer orthogonalises matrices within {kind!r}, where they cannot be distributed "
        "over the {count} devices, each of which would do all of it. Take the branch or loop out "
        "of the optimizer: nonfinite='skip' of build_train_step is apply_if_finite without a "
        "branch",
        lambda spec: _matrices(spec) if spec.stored.update.needs_matrices else None,
    ),
)
"""The rules for every step, whatever its batch. Rules about the batch are checked by tracing.

Stages, staged optimizers and layouts raise where they are built: in the first rule that needs them,
or in the step.
"""


PIPELINE_RULES: tuple[Requirement[StepSpec], ...] = (
    Requirement.row(
        "microbatches are the pipeline's",
        StrategyConflictError,
        "accumulate={accumulate}, and the pipeline runs {count} microbatches per step, which is "
        "its accumulation; leave accumulate out, or change num_microbatches",
        lambda spec: None if spec.options.accumulate == 1 else _microbatches(spec),
    ),
    Requirement.row(
        "stages have experts in equal blocks",
        UnsupportedError,
        "the pipeline has {path!r} {where}, and experts that tokens are sent to along {axis!r} "
        "must be those of modules with these methods, as models.Experts, in blocks with parameters "
        "of equal shapes. Leave expert_parallel out, and split the batch by ddp or fsdp in "
        "addition to the pipeline; or leave the pipeline out",
        lambda spec: _stage_experts(spec) if spec.strategy.resident else None,
    ),
    Requirement.row(
        "stages recompute their blocks",
        StrategyConflictError,
        "the stages of a pipeline recompute block by block, here {blocks}, and activation "
        "checkpointing names the classes {classes}; leave the classes out, or give them to the "
        "pipeline: classes=(...)",
        lambda spec: _stage_classes(spec) if spec.strategy.remat else None,
    ),
)
"""The additional rules for a pipeline."""


def _stops_replicas(spec: StepSpec) -> Found:
    slow = spec.strategy.slow
    policy = spec.options.nonfinite
    if slow is None or policy is None or not policy.holds:
        return None
    return {"axis": slow.axis, "policy": policy.value}


def _ema_of_replicas(spec: StepSpec) -> Found:
    slow = spec.strategy.slow
    ema = spec.options.ema
    return None if slow is None or ema is None else {"axis": slow.axis, "ema": ema}


def _fragments(spec: StepSpec) -> Found:
    slow = spec.strategy.slow
    count = len(jax.tree.leaves(spec.stored.params))
    if slow is None or all(Outer(spec).fragments):
        return None
    return {"count": slow.fragments, "params": count, "name": spec.strategy.name}


def _compressed(spec: StepSpec) -> Found:
    slow = spec.strategy.slow
    leaves = leaves_with_paths(spec.stored.params)
    complex_ = next((p for p, x in leaves if jnp.issubdtype(x.dtype, jnp.complexfloating)), None)
    if slow is None or slow.compression is None or complex_ is None:
        return None
    return {"path": complex_, "how": slow.compression}


REPLICA_RULES: tuple[Requirement[StepSpec], ...] = (
    ELASTIC_BITS,
    *STRATEGY_RULES,
    Requirement.row(
        "no replica waits for another",
        UnsupportedError,
        "nonfinite={policy!r} keeps the state of all ranks from the first step that is not finite, "
        "and replicas over axis {axis!r} would have to tell each other on every step; use 'skip', "
        "with which each leaves out its own batch, in a config train: {{nonfinite: skip}}",
        _stops_replicas,
    ),
    Requirement.row(
        "EMA needs one set of parameters",
        UnsupportedError,
        "ema={ema} averages the parameters of every step, and replicas over axis {axis!r} agree "
        "on their parameters only in an outer step; leave ema out: the outer optimizer averages, "
        "as in diloco(outer=optax.sgd(0.7, momentum=0.9, nesterov=True))",
        _ema_of_replicas,
    ),
    Requirement.row(
        "fragments have parameters",
        StrategyConflictError,
        "strategy {name!r} has fragments={count}, and the model's {params} parameters do not fill "
        "that many of about one size; use fewer",
        _fragments,
    ),
    Requirement.row(
        "compressed parameters are real",
        UnsupportedError,
        "the parameter {path!r} is complex, and {how} compresses real numbers only; leave the "
        "compression out",
        _compressed,
    ),
)
"""The additional rules for a step with several replicas."""


def check_rules(spec: StepSpec) -> None:
    """Raises the error of the first broken rule; warns if statistics are those of a microbatch.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.

    Raises:
        AxonDistError: of the class that the broken rule has.
    """
    if spec.strategy.slow is not None:
        check_all(REPLICA_RULES, spec)
        spec = spec.replica(region=False)
    check_all(RULES, spec)
    if spec.strategy.pipeline is not None:
        check_all(PIPELINE_RULES, spec)
    if spec.num_microbatches > 1:
        warn_of_statistics(spec.parts.abstract, spec.num_microbatches)
