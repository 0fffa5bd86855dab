"""`Pipeline`: a model cut into stages on different ranks, run by a schedule."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from flax import nnx

from ..core.checks import MODEL, SIZE, ArgumentKind, checked, is_number
from ..core.errors import ConfigError, did_you_mean
from ..core.files import as_path, kind_at, read_text
from ..nn import POLICIES, ActivationCheckpointing
from ..schedule import (
    SCHEDULES,
    PipelineSchedule,
    Schedule,
    build_schedule,
    validate,
    with_vocabulary,
)
from ..schedule.action import check_sizes
from .plans import PipelinePlan
from .strategy import Strategy

BACKWARD = ("recompute", "residuals")
"""Where a backward pass gets the intermediate results of its stage from."""


_COST = ArgumentKind("a positive number, of one block", lambda x: is_number(x) and x > 0)
_CLASSES = ArgumentKind(
    'the name of a block class, the class itself, or a tuple of these, such as ("Block",)',
    lambda x: all(
        isinstance(each, (str, type)) for each in (x if isinstance(x, (tuple, list)) else (x,))
    ),
)
_STAGES = ArgumentKind("an nnx.Module, of one stage", lambda x: isinstance(x, nnx.Module)).several()


@checked(costs=_COST.several().or_none(), classes=_CLASSES)
def pipelined(
    num_stages: int,
    num_microbatches: int,
    schedule: str | Schedule = PipelineSchedule.EAGER_1F1B,
    *,
    chunks: int | None = None,
    axis: str = "pp",
    classes: str | type | Sequence[str | type] = (),
    boundaries: tuple[int, ...] | None = None,
    costs: tuple[float, ...] | None = None,
    backward: str = "recompute",
    split_vocabulary: bool = False,
) -> Strategy:
    """Pipeline parallelism as a strategy: blocks are split over `axis`, microbatches pass through.

    Composed with data parallelism, each rank gathers the weights of its stages (where they are
    split) once per step and reduces their gradients once, at every ZeRO stage: once per microbatch
    would multiply the bytes sent. ZeRO-3 therefore saves memory between steps, but within a step a
    rank holds its stages whole.

    Args:
        num_stages: **ranks** along the axis, each with `chunks` stages.
        num_microbatches: microbatches per step.
        schedule: a name of `PipelineSchedule`, a table, or the path of a CSV file with one. The
            default is the 1F1B that is fastest when ranks run in lockstep: rank s keeps `2(S-s)-1`
            inputs for it. `"1f1b"` keeps `S-s`, but its step takes up to 1.8 times as long.
        chunks: stages per rank; None uses the schedule's usual number.
        axis: the mesh axis of the pipeline.
        classes: the block classes or their names, one or several; empty for the blocks that the
            model keeps in lists or that a bridged Linen model repeats. Blocks of a Linen model are
            named without their number: `"encoder/layer"` for `encoder/layer/0`.
        boundaries: the first block of each stage, then the number of blocks. If the loss
            does not call each block once and in order, boundaries count the block calls on the
            longest path through the loss.
        costs: the cost of each block, or of each such call, by which stages are balanced.
        backward: `"recompute"` keeps a stage's input and recomputes the stage; `"residuals"` keeps
            everything that the backward pass needs; the name of an `ActivationCheckpointing` policy
            keeps what that policy saves of each block.
        split_vocabulary: splits embedding and head over the ranks by the vocabulary. Head and loss
            become separate actions `V`, the lookups become `E` and their gradients `G`; all ranks
            run them together. The last stage is then not the slowest, no rank holds embedding or
            head whole, and backward passes start one or two ticks later. The loss must end in
            `linear_cross_entropy`; its head may be tied to the embedding. A table that has these
            actions splits the vocabulary in any case.

    Returns:
        The strategy.

    Raises:
        ScheduleError: for an unknown schedule, sizes that it does not support, a table that is not
            valid, or one with no room for the vocabulary's actions.
        ConfigError: for a table whose sizes differ from those given, a missing file, an unknown
            `backward`, or `classes` or `boundaries` of another type.

    Example:
        >>> pipelined(num_stages=4, num_microbatches=8).pipeline.schedule.name
        'eager_1f1b'
    """
    table = read_schedule(schedule, num_stages, num_microbatches, chunks)
    table = with_vocabulary(table) if split_vocabulary else table
    if backward not in (valid := [*BACKWARD, *POLICIES]):
        raise ConfigError(f"backward={backward!r} is unknown.{did_you_mean(backward, valid)}")
    keeps = backward != "recompute"
    entries = (classes,) if isinstance(classes, (str, type)) else classes
    names = tuple(each if isinstance(each, str) else each.__name__ for each in entries)
    if boundaries is not None:
        boundaries = tuple(map(operator.index, boundaries))
    plan = PipelinePlan(table, axis, names, boundaries, costs, keeps)
    remat = ActivationCheckpointing(policy=backward) if backward in POLICIES else None
    return Strategy("pipeline", pipeline=plan, remat=remat)


class PipelineStage(nnx.Module):
    """A module and its place in a pipeline.

    Args:
        module: the computation of the stage.
        stage_id: the stage's number within the whole model.
        device_rank: the rank that runs it; None leaves it to the schedule.

    Example:
        >>> import jax.numpy as jnp
        >>> stage = PipelineStage(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), stage_id=0)
        >>> stage(jnp.ones((1, 2))).shape
        (1, 3)
    """

    @checked("PipelineStage", module=MODEL, stage_id=SIZE, device_rank=SIZE.or_none())
    def __init__(self, module: nnx.Module, stage_id: int, device_rank: int | None = None):
        self.module: nnx.Module = module
        self.stage_id: int = stage_id
        self.device_rank: int | None = device_rank

    def __call__(self, x: object) -> Any:
        """Runs the module."""
        return self.module(x)


class StageChain(nnx.Module):
    """Modules that feed each other: `x = stage(x)` for each in order.

    Args:
        stages: modules in the order in which they are called.
    """

    def __init__(self, stages: Sequence[nnx.Module]):
        self.stages = nnx.List(stages)

    def __call__(self, x: object) -> Any:
        """Runs all stages."""
        for stage in self.stages:
            x = stage(x)
        return x


class Pipeline:
    """Cuts a model into pipeline stages; named as in PyTorch, run as one jitted step.

    Pass `pipe.module` and `pipe` to `build_train_step`. The step equals gradient accumulation over
    the microbatches on one device.

    Args:
        module: an unmodified NNX module that runs its blocks one after another, or a function of
            no arguments that makes one.
        num_stages: **ranks** along the axis, each with `chunks` stages.
        num_microbatches: microbatches per step; `num_stages` by default.
        schedule: a name of `PipelineSchedule`, a table, or the path of a CSV file with one.
        chunks: stages per rank; None uses the schedule's usual number.
        options: those of `pipelined`.

    Raises:
        ScheduleError: for an unknown schedule, sizes that it does not support, or a table that is
            not valid.
        ConfigError: for a table whose sizes differ from those given.

    Example:
        >>> layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(4)]
        >>> pipe = Pipeline(nnx.Sequential(*layers), num_stages=2, num_microbatches=4)
        >>> pipe.num_stages(), pipe.strategy.pipeline.schedule.name
        (2, 'eager_1f1b')

    Source: Huang et al., GPipe, arXiv:1811.06965; Narayanan et al., arXiv:2104.04473.
    """

    @checked("Pipeline", module=MODEL)
    def __init__(
        self,
        module: nnx.Module,
        num_stages: int,
        num_microbatches: int | None = None,
        schedule: str | Schedule = PipelineSchedule.EAGER_1F1B,
        *,
        chunks: int | None = None,
        **options: Any,
    ):
        count = num_stages if num_microbatches is None else num_microbatches
        self.module = module
        self.strategy: Strategy = pipelined(num_stages, count, schedule, chunks=chunks, **options)

    @classmethod
    @checked("Pipeline.from_modules", modules=_STAGES)
    def from_modules(
        cls,
        modules: Sequence[nnx.Module],
        num_microbatches: int | None = None,
        schedule: str | Schedule = PipelineSchedule.EAGER_1F1B,
        *,
        chunks: int | None = None,
        **options: Any,
    ) -> Pipeline:
        """Makes a pipeline with a separate module in each stage.

        Parameters and activations may have different shapes in each stage.

        Args:
            modules: one per stage, in order; `PipelineStage`s are put in the order of their ids.
            num_microbatches: microbatches per step; the number of ranks by default.
            schedule: a name of `PipelineSchedule`, a table, or the path of a CSV file with one.
            chunks: stages per rank; None uses the schedule's usual number.
            options: those of `pipelined`.

        Returns:
            The pipeline; its `module` runs all stages.

        Raises:
            ConfigError: when there are no stages, when their number does not divide over the ranks
                or differs from the table's, or when their ids or ranks do not fit the schedule.

        Example:
            >>> sizes = [(8, 16), (16, 2)]
            >>> stages = [nnx.Linear(*size, rngs=nnx.Rngs(0)) for size in sizes]
            >>> Pipeline.from_modules(stages, num_microbatches=4).num_stages()
            2
        """
        ordered = _in_order(modules)
        schedule = _read_table(schedule)
        pipe = cls(
            StageChain(ordered),
            _num_ranks(len(ordered), schedule, chunks),
            num_microbatches,
            schedule,
            chunks=chunks,
            boundaries=tuple(range(len(ordered) + 1)),
            **options,
        )
        _check_ranks(ordered, pipe.schedule)
        return pipe

    @property
    def schedule(self) -> Schedule:
        """The schedule's table."""
        assert self.strategy.pipeline is not None
        return self.strategy.pipeline.schedule

    def num_stages(self) -> int:
        """Returns the number of stages of the whole model."""
        return self.schedule.num_stages

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Runs the whole module."""
        return self.module(*args, **kwargs)

    forward = __call__


def _in_order(modules: Sequence[nnx.Module]) -> list[nnx.Module]:
    if len(modules) == 0:
        raise ConfigError("got no modules; a pipeline needs at least one, and each is a stage")
    ids = [m.stage_id if isinstance(m, PipelineStage) else i for i, m in enumerate(modules)]
    if sorted(ids) != list(range(len(modules))):
        raise ConfigError(
            f"got the stage ids {ids}; {len(modules)} stages need each of 0..{len(modules) - 1} "
            "once"
        )
    return [modules[ids.index(stage)] for stage in range(len(modules))]


def _check_ranks(stages: Sequence[nnx.Module], schedule: Schedule) -> None:
    for number, stage in enumerate(stages):
        asked = getattr(stage, "device_rank", None)
        if asked not in (None, schedule.placement[number]):
            raise ConfigError(
                f"stage {number} asks for rank {asked}, and schedule {schedule.name!r} places it "
                f"on rank {schedule.placement[number]}; leave device_rank out, or bring a table "
                "with another placement"
            )


def _num_ranks(count: int, schedule: str | Schedule, chunks: int | None) -> int:
    """Returns the number of ranks that `count` stages need."""
    if isinstance(schedule, Schedule):
        if count != schedule.num_stages:
            raise ConfigError(
                f"got {count} modules, and schedule {schedule.name!r} has {schedule.num_stages} "
                "stages; give one module per stage"
            )
        return schedule.num_devices
    usual = SCHEDULES[PipelineSchedule(schedule)].chunks if schedule in SCHEDULES else 1
    per_rank = usual if chunks is None else chunks
    check_sizes(chunks=per_rank)
    if count % per_rank:
        raise ConfigError(
            f"got {count} stages and {per_rank} chunks per rank; the number of stages must be a "
            f"multiple of {per_rank}"
        )
    return count // per_rank


def read_schedule(
    schedule: str | Schedule, num_stages: int, num_microbatches: int, chunks: int | None
) -> Schedule:
    """Returns the validated table of a schedule's name, of a CSV file, or the table itself.

    Raises:
        ScheduleError: for an unknown schedule, sizes that it does not support, or a table that is
            not valid.
        ConfigError: for a table whose sizes differ from those given, or a missing file.
    """
    table = _read_table(schedule)
    if isinstance(table, str):
        table = build_schedule(table, num_stages, num_microbatches, chunks)
    got = {"num_stages": table.num_devices, "num_microbatches": table.num_microbatches}
    asked = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    if got != asked or (chunks is not None and chunks != table.chunks):
        raise ConfigError(
            f"schedule {table.name!r} has {got} and {table.chunks} chunks, and the pipeline was "
            f"given {asked} and chunks={chunks}; make them equal"
        )
    validate(table)
    return table


def _read_table(schedule: str | Schedule) -> Schedule | str:
    """Returns a `Schedule`, read from its CSV file if a path is given; a name is returned as is."""
    if isinstance(schedule, Schedule) or not str(schedule).endswith(".csv"):
        return schedule
    path = as_path(str(schedule), "schedule")
    if kind_at(path) is None:
        raise ConfigError(
            f"there is no file {str(path)!r}; give the path of a table, which Schedule.to_csv() "
            "writes, or the name of a schedule"
        )
    return Schedule.from_csv(read_text(path, f"the table {str(path)!r}"), path.stem)
