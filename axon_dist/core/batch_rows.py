"""Which rows of a global batch a process has, as plain numbers.

A batch is cut into rows of replicas, those into microbatches, and each microbatch into equal parts.
A process has some of the parts. They need not be consecutive: that depends on the order of the
batch axes, and on which devices the process owns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from .errors import ConfigError, DivisibilityError


def local_rows(global_batch: int, process: int, num_processes: int) -> slice:
    """Returns part `process` of `num_processes` consecutive equal parts of some rows.

    These are the rows that a process gives to a step only if the step has one microbatch, and the
    processes own consecutive ranks along the batch axes, each its own. `TrainStep.own_rows` returns
    the rows for any step.

    Args:
        global_batch: rows over all processes, of the batch or the microbatch.
        process: the index of the process, from 0.
        num_processes: the number of processes.

    Returns:
        A slice of `global_batch / num_processes` rows.

    Raises:
        ConfigError: the batch is empty or there is no such process.
        DivisibilityError: the batch does not divide by the processes.

    Example:
        >>> local_rows(8, process=1, num_processes=2)
        slice(4, 8, None)
    """
    if not 0 <= process < num_processes:
        raise ConfigError(
            f"process {process} of {num_processes} does not exist: give one from 0 to "
            f"{num_processes - 1}."
        )
    if global_batch < 1:
        raise ConfigError(f"a global batch of {global_batch} must have at least 1 row; raise it.")
    size, rest = divmod(global_batch, num_processes)
    if rest:
        near = max(size, 1) * num_processes
        raise DivisibilityError(
            f"a global batch of {global_batch} rows does not divide by {num_processes} processes: "
            f"each loads the same number; choose a multiple of {num_processes}, such as {near}."
        )
    return slice(process * size, (process + 1) * size)


def rows_of_parts(
    global_batch: int,
    parts: Sequence[int],
    num_parts: int,
    num_microbatches: int = 1,
    num_replicas: int = 1,
) -> np.ndarray:
    """Returns the rows of a global batch that a process has, microbatch by microbatch.

    With replicas it has those of one replica after another, each microbatch by microbatch.

    Args:
        global_batch: rows over all processes.
        parts: the parts of the batch axes that the process owns, in ascending order.
        num_parts: the number of equal parts.
        num_microbatches: the number of microbatches, K.
        num_replicas: the number of replicas that each cut their own rows into K.

    Returns:
        int64 `[rows]`, in the order in which the process gives them to a step.

    Raises:
        ConfigError: the batch is empty, or there is no such part.
        DivisibilityError: the batch does not divide by the replicas, microbatches and parts.

    Example:
        >>> rows_of_parts(8, [0], 2, 2).tolist(), rows_of_parts(8, [1], 2, 2).tolist()
        ([0, 1, 4, 5], [2, 3, 6, 7])
        >>> rows_of_parts(8, [0, 2], 4).tolist()
        [0, 1, 4, 5]
    """
    cuts = num_replicas * num_microbatches
    size, rest = divmod(global_batch, cuts)
    if rest:
        near = max(size, 1) * cuts
        of_replicas = f"{num_replicas} replicas of " if num_replicas > 1 else ""
        raise DivisibilityError(
            f"a global batch of {global_batch} rows does not divide by {of_replicas}"
            f"{num_microbatches} microbatches; use {near} or {near + cuts} rows"
        )
    if wrong := [part for part in parts if not 0 <= part < num_parts]:
        raise ConfigError(
            f"part {wrong[0]} of {num_parts} does not exist: give parts from 0 to {num_parts - 1}."
        )
    # A part may hold several replicas, or a replica several parts: both are whole pieces.
    pieces = math.lcm(num_replicas, num_parts) // num_replicas
    if size < 1 or size % pieces:
        near = max(size // pieces, 1) * pieces * cuts
        of_microbatches = f" in each of {cuts} microbatches" if cuts > 1 else ""
        raise DivisibilityError(
            f"a global batch of {global_batch} rows does not divide into the {pieces} parts that "
            f"the processes load{of_microbatches}; choose a multiple of {pieces * cuts}, such as "
            f"{near}"
        )
    rows = np.arange(global_batch).reshape(num_replicas, num_microbatches, pieces, -1)
    each = num_replicas * pieces // num_parts
    own = [part * each + at for part in parts for at in range(each)]
    by_replica = itertools.groupby(own, lambda piece: piece // pieces)
    return np.concatenate(
        [rows[r][:, [at % pieces for at in numbers]].reshape(-1) for r, numbers in by_replica]
    )
