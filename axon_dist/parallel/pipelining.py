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
"""Where a backward pass has the intermediate results of its stage from."""


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

    Beside data parallelism each rank gathers the weights of its stages once per step, where
    they are split at all, and reduces their gradients once, whatever stage of ZeRO it is composed
    with: per microbatch it would move as many times the bytes. ZeRO-3 so saves memory between
    steps, and within a step a rank holds its stages whole.

    Args:
        num_stages: **ranks** along the axis, each with `chunks` stages.
        num_microbatches: microbatches per step.
        schedule: a name of `PipelineSchedule`, a table, or the path of a CSV file with one. The
            default is 1F1B as it is fastest in step: a rank keeps `2(S-s)-1` inputs for it, and
            `"1f1b"` keeps `S-s` in a step that takes up to 1.8 times as long.
        chunks: stages per rank; None takes what is usual for the schedule.
        axis: the mesh axis of the pipeline.
        classes: the block classes or their names, one or several; empty for the blocks that the
            model keeps in lists or that a bridged Linen model repeats. Of these the name without
            the number, `"encoder/layer"` for `encoder/layer/0`.
        boundaries: the first block of each stage, and the number of blocks; of a loss that calls
            blocks otherwise than once each and in order, the first of the calls on the longest way
            through it, and their number.
        costs: the cost of each block, or of each such call, to balance the stages by.
        backward: `"recompute"` keeps a stage's input and recomputes the stage, `"residuals"` keeps
            all that the backward pass needs, and the name of a policy of
            `ActivationCheckpointing` keeps of each block what that policy saves.
        split_vocabulary: splits embedding and head over the ranks by the vocabulary, and gives
            head and loss separate actions, `V`, that all ranks do together, and the lookups
            `E`, and the gradients of these `G`: the last stage is then not the slowest, no rank
            holds embedding or head whole, and backwards start one or two ticks later. The loss must
            end in `linear_cross_entropy`; its head may be tied to the embedding. A table that has
            these actions has them split in any case.

    Returns:
        The strategy.

    Raises:
        ScheduleError: for an unknown schedule, sizes it cannot do, a table that is not valid, or
            one whose cells leave no place for the vocabulary.
        ConfigError: for a table of other sizes than asked for, a file that is not there, an
            unknown `backward`, or `classes` or `boundaries` of another type.

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
        module: what the stage computes.
        stage_id: its number through the whole model.
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
    """Cuts a model into stages for pipeline parallelism; PyTorch's name, one jitted step inside.

    Pass `pipe.module` and `pipe` to `build_train_step`. The step equals gradient accumulation over
    the microbatches on one device.

    Args:
        module: an NNX module that runs its blocks one after another, unmodified, or a function of
            no arguments that makes one.
        num_stages: **ranks** along the axis, each with `chunks` stages.
        num_microbatches: microbatches per step; `num_stages` by default.
        schedule: a name of `PipelineSchedule`, a table, or the path of a CSV file with one.
        chunks: stages per rank; None takes what is usual for the schedule.
        options: those of `pipelined`.

    Raises:
        ScheduleError: for an unknown schedule, sizes it cannot do, or a table that is not valid.
        ConfigError: for a table of other sizes than asked for.

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
        """A pipeline with a separate module in each stage.

        Parameters and activations may have different shapes in each.

        Args:
            modules: one per stage, in order; `PipelineStage`s are put in the order of their ids.
            num_microbatches: microbatches per step; the number of ranks by default.
            schedule: a name of `PipelineSchedule`, a table, or the path of a CSV file with one.
            chunks: stages per rank; None takes what is usual for the schedule.
            options: those of `pipelined`.

        Returns:
            The pipeline; its `module` runs all stages.

        Raises:
            ConfigError: when there are no stages, they do not divide over the ranks or are not as
                many as a table has, or their ids or ranks do not fit the schedule.

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
        """The table."""
        assert self.strategy.pipeline is not None
        return self.strategy.pipeline.schedule

    def num_stages(self) -> int:
        """Stages through the whole model."""
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
    """The ranks that so many stages need."""
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
    """The table of a name, of a CSV file, or the table itself; validated.

    Raises:
        ScheduleError: for an unknown schedule, sizes it cannot do, or a table that is not valid.
        ConfigError: for a table of other sizes than asked for, or a file that is not there.
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
    """A user's table, a `Schedule` or a CSV file; the name, where that is what it is."""
    if isinstance(schedule, Schedule) or not str(schedule).endswith(".csv"):
        return schedule
    path = as_path(str(schedule), "schedule")
    if kind_at(path) is None:
        raise ConfigError(
            f"there is no file {str(path)!r}; give the path of a table, which Schedule.to_csv() "
            "writes, or the name of a schedule"
        )
    return Schedule.from_csv(read_text(path, f"the table {str(path)!r}"), path.stem)
