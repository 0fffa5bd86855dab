"""`StepProfile`: some steps of a run, traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax


class StepProfile:
    """Records steps `at`, `at + 1`, ... as a trace that ui.perfetto.dev and XProf read.

    The trace shows the scopes of a step: `microbatch`, `optimizer`, and in a pipeline its phases
    and transfers. The first step of a process compiles, and is left out.

    Args:
        at: the first step that is traced, counted from 1; 0 traces none.
        steps: how many.
        directory: the folder to write into.
    """

    def __init__(self, at: int, steps: int, directory: str | Path | None):
        self._steps = range(at, at + steps) if at and directory is not None else range(0)
        self._directory = str(directory)
        self._is_on = False

    @contextmanager
    def around(self, number: int, settle: Callable[[], None]) -> Iterator[None]:
        """Traces a step, if it is one of those.

        Args:
            number: of the step, counted from 1.
            settle: waits for every step taken.
        """
        if number not in self._steps:
            yield
            return
        if not self._is_on:
            settle()
            jax.profiler.start_trace(self._directory)
            self._is_on = True
        with jax.profiler.StepTraceAnnotation("train_step", step_num=number):
            yield
        if number == self._steps[-1]:
            settle()
            self.close()

    def close(self) -> None:
        """Ends a trace that is still recorded, because the run ends before it."""
        if self._is_on:
            self._is_on, self._steps = False, range(0)
            jax.profiler.stop_trace()
