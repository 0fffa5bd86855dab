"""Pipeline parallelism: a model cut into stages on different ranks, run by a schedule."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from ..core.checks import ArgumentKind, checked, is_number
from ..core.errors import ConfigError, did_you_mean
from ..core.files import as_path, kind_at, read_text
from ..core.renamed import renamed_arguments
from ..nn import POLICIES, ActivationCheckpointing
from ..schedule import (
    PipelineSchedule,
    Schedule,
    build_schedule,
    validate,
    with_vocabulary,
)
from ..schedule.action import check_sizes
from .strategy import Strategy
from .strategy_values import PipelinePlan

BACKWARD = ("recompute", "residuals")
"""Where a backward pass gets the intermediate results of its stage from."""


_COST = ArgumentKind("a positive number, of one block", lambda x: is_number(x) and x > 0)
_CLASSES = ArgumentKind(
    'the name of a block class, the class itself, or a tuple of these, such as ("Block",)',
    lambda x: all(
        isinstance(each, (str, type)) for each in (x if isinstance(x, (tuple, list)) else (x,))
    ),
)


@renamed_arguments(num_stages="num_ranks")
@checked(costs=_COST.several().or_none(), classes=_CLASSES)
def pipelined(
    num_ranks: int,
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

    Composed with data parallelism of any ZeRO stage, each rank gathers the weights of its pipeline
    stages (where they are split) and reduces their gradients once per step. Once per microbatch
    would multiply the bytes sent. ZeRO-3 therefore saves memory between steps, but within a step a
    rank holds its stages whole.

    Args:
        num_ranks: the ranks along the axis, each with `chunks` stages.
        num_microbatches: microbatches per step.
        schedule: a name of `PipelineSchedule`, a table, or the path of a CSV file with one. The
            default is the 1F1B that is fastest when ranks run in lockstep: rank s keeps `2(S-s)-1`
            inputs for it. `"1f1b"` keeps `S-s`, but its step takes up to 1.5 times as long if
            a backward pass, which recomputes its stage, takes as long as 3 forward passes.
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
            head whole, and backward passes start later, usually by two or three ticks. The loss
            must end in `linear_cross_entropy`; its head may be tied to the embedding. A table that
            has these actions splits the vocabulary in any case.

    Returns:
        The strategy.

    Raises:
        ScheduleError: for an unknown schedule, sizes that it does not support, a table that is not
            valid, or one into which the vocabulary's actions do not fit.
        ConfigError: for a table whose sizes differ from those given, a missing file, an unknown
            `backward`, or `classes` or `boundaries` of another type.

    Example:
        >>> pipelined(num_ranks=4, num_microbatches=8).pipeline.schedule.name
        'eager_1f1b'
    """
    table = read_schedule(schedule, num_ranks, num_microbatches, chunks)
    table = with_vocabulary(table) if split_vocabulary else table
    if backward not in (valid := [*BACKWARD, *POLICIES]):
        raise ConfigError(f"backward={backward!r:.80} is unknown.{did_you_mean(backward, valid)}")
    saves_residuals = backward != "recompute"
    entries = (classes,) if isinstance(classes, (str, type)) else classes
    names = tuple(each if isinstance(each, str) else each.__name__ for each in entries)
    if boundaries is not None:
        boundaries = tuple(map(operator.index, boundaries))
    plan = PipelinePlan(table, axis, names, boundaries, costs, saves_residuals)
    remat = ActivationCheckpointing(policy=backward) if backward in POLICIES else None
    return Strategy("pipeline", pipeline=plan, remat=remat)


def read_schedule(
    schedule: str | Schedule, num_ranks: int, num_microbatches: int, chunks: int | None
) -> Schedule:
    """Returns the validated table of a schedule's name, of a CSV file, or the table itself.

    Raises:
        ScheduleError: for an unknown schedule, sizes that it does not support, or a table that is
            not valid.
        ConfigError: for a table whose sizes differ from those given, or a missing file.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    table = read_table(schedule)
    if isinstance(table, str):
        table = build_schedule(table, num_ranks, num_microbatches, chunks)
    sizes = (table.num_devices, table.num_microbatches)
    if sizes != (num_ranks, num_microbatches) or (chunks is not None and chunks != table.chunks):
        raise ConfigError(
            f"schedule {table.name!r} is for {table.num_devices} ranks with {table.chunks} chunks "
            f"each and {table.num_microbatches} microbatches, but the pipeline was given "
            f"{num_ranks} ranks, chunks={chunks} and {num_microbatches} microbatches; make them "
            "equal",
            code="schedule-sizes",
        )
    validate(table)
    return table


def read_table(schedule: str | Schedule) -> Schedule | str:
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
