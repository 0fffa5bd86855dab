"""`Trainer`: takes the steps of a run, validates, tells, and stops cleanly."""

from __future__ import annotations

import collections
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TypeVar

from axon_dist.core.errors import ConfigError
from axon_dist.core.tree import num_params
from axon_dist.core.typing import Batch

from .meters import bytes_per_device, model_flops_utilization
from .metrics import MetricWriter
from .progress import Progress, SilentProgress
from .record import Record
from .state import TrainState
from .step import TrainStep
from .stop import StopConsensus, StopRequest, stop_on_signals

_T = TypeVar("_T")
_LAG = 2
FINISHED = "finished"
"""The reason of a run that got to its last step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How long a loop runs and how often it tells.

    Args:
        num_steps: the step to stop at, counted from the first of the state.
        log_every: steps averaged into one record.
        eval_every: steps between validations; 0 validates only at the end.
        save_every: steps between saves; 0 saves only at the end.
        tokens_per_step: tokens in a global batch; None leaves the throughput out.
        peak_flops: FLOP/s of one device at best, to measure utilization against; None leaves it
            out.
    """

    num_steps: int
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 0
    tokens_per_step: int | None = None
    peak_flops: float | None = None

    def validate(self) -> None:
        """Raises `ConfigError` unless the counts are possible."""
        if min(self.num_steps, self.log_every) < 1 or min(self.eval_every, self.save_every) < 0:
            raise ConfigError(
                f"got num_steps={self.num_steps}, log_every={self.log_every}, "
                f"eval_every={self.eval_every} and save_every={self.save_every}; the first two "
                "must be at least 1, the others at least 0"
            )
        if self.peak_flops is not None and self.tokens_per_step is None:
            raise ConfigError(
                f"peak_flops={self.peak_flops} needs tokens_per_step to measure utilization; set it"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run came to.

    Args:
        state: after the last step.
        num_steps: steps that the state has taken.
        reason: why the run ended, such as `finished` or `SIGINT`.
        train_curve: pairs of step and mean training loss.
        validation_curve: pairs of step and validation loss.
        compile_seconds: until the first step was done.
        train_seconds: of all later steps, validation not counted.
        tokens_per_second: over the train seconds; None if unknown.
        device_bytes: of the train state, on the fullest device.
    """

    state: TrainState
    num_steps: int
    reason: str
    train_curve: tuple[tuple[int, float], ...]
    validation_curve: tuple[tuple[int, float], ...]
    compile_seconds: float
    train_seconds: float
    tokens_per_second: float | None
    device_bytes: int

    @property
    def is_finished(self) -> bool:
        """Whether the run got to its last step."""
        return self.reason == FINISHED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """The loop around a step: `for batch in batches: state, metrics = step(state, batch)`.

    Metrics are read two steps late. That keeps two steps queued on the devices while the host
    loads and places the next batch, so that neither waits for the other, and bounds how far the
    host runs ahead.

    SIGINT (Ctrl-C) and SIGTERM end the run after the step under way, with everything kept.

    Args:
        step: from `build_train_step`.
        batches: what the step takes; the run ends early if they do.
        options: length and rhythm.
        validation: makes the batches of one validation, all of one size; None does not validate.
        writers: take the metrics.
        progress: shows the run.
        should_stop: reads the latest record of metrics; the run ends on every process as soon as
            it returns true on one.
        save: `save(state, number, loss)` takes a state between two steps, the number of steps it
            has taken, and its validation loss or None; must be done with the arrays when it
            returns. It gets the last state too, however the run ends but by an error. All that
            `batches` has handed out by then went into the state.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax
        >>> from flax import nnx
        >>> from axon_dist.mesh import World
        >>> from axon_dist.parallel import ddp
        >>> from axon_dist.train import build_train_step
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> loss_fn = lambda model, batch: jnp.mean((model(batch["x"]) - 1.0) ** 2)
        >>> step = build_train_step(model, optax.sgd(0.1), loss_fn, ddp(), World.emulate(8))
        >>> batches = [{"x": np.ones((8, 2), np.float32)}] * 20
        >>> trainer = Trainer(step=step, batches=batches, options=LoopOptions(num_steps=20))
        >>> result = trainer.fit()
        >>> result.reason, result.train_curve[-1][1] < 0.01
        ('finished', True)
    """

    step: TrainStep
    batches: Iterable[Batch]
    options: LoopOptions
    validation: Callable[[], Iterable[Batch]] | None = None
    writers: Sequence[MetricWriter] = ()
    progress: Progress = SilentProgress()
    should_stop: Callable[[Mapping[str, float]], bool] | None = None
    save: Callable[[TrainState, int, float | None], None] | None = None

    def fit(self, state: TrainState | None = None) -> TrainResult:
        """Trains until the last step, the end of the data, or a reason to stop.

        Args:
            state: where to go on; None starts from `step.init()`. Its arrays are used up.

        Returns:
            The result, with the last state.

        Raises:
            ConfigError: when the options are not possible, or there is no batch or no step left.
        """
        self.options.validate()
        with self.progress, stop_on_signals(self._tell_signal) as request:
            with self.progress.phase("initializing"):
                state = self.step.init() if state is None else state
                record = self._record(state)
            self._check_steps_left(record)
            start = time.perf_counter()
            run = self._first_step(state, record)
            compile_seconds = time.perf_counter() - start
            state, reason = self._steps(*run, record, request)
            self._finish(state, record, reason)
        return TrainResult(
            state=state,
            num_steps=record.step,
            reason=reason,
            train_curve=tuple(record.train_curve),
            validation_curve=tuple(record.validation_curve),
            compile_seconds=compile_seconds,
            train_seconds=record.train_seconds,
            tokens_per_second=record.tokens_per_second,
            device_bytes=record.device_bytes,
        )

    def _record(self, state: TrainState) -> Record:
        options, utilization = self.options, None
        if options.peak_flops is not None:
            utilization = functools.partial(
                model_flops_utilization,
                num_params(state.params),
                peak_flops=options.peak_flops,
                num_devices=self.step.world.size,
            )
        return Record(
            int(state.step),
            options.num_steps,
            options.log_every,
            self.writers,
            self.progress,
            bytes_per_device(state),
            options.tokens_per_step,
            utilization,
        )

    def _check_steps_left(self, record: Record) -> None:
        if record.step >= self.options.num_steps:
            raise ConfigError(
                f"the state has taken {record.step} steps and the run ends at step "
                f"{self.options.num_steps}; raise the number of steps"
            )

    def _first_step(self, state: TrainState, record: Record) -> tuple[TrainState, Iterator[Batch]]:
        batches = iter(self.batches)
        first = next(batches, None)
        if first is None:
            raise ConfigError("there is no batch to train on; give the trainer at least one")
        with self.progress.phase("compiling the train step"):
            state, metrics = self.step(state, first)
            record.add(record.step + 1, metrics)
            record.settle()
        record.start_clock()
        return state, batches

    def _steps(
        self, state: TrainState, batches: Iterator[Batch], record: Record, request: StopRequest
    ) -> tuple[TrainState, str]:
        consensus = StopConsensus(self.step.world)
        for number in range(record.step + 1, self.options.num_steps + 1):
            self._pause_after(number - 1, state, record)
            if consensus(self._wants_stop(record, request)):
                return state, request.reason or "another process"
            batch = next(batches, None)
            if batch is None:
                return state, "out of data"
            state, metrics = self.step(state, batch)
            record.add(number, metrics)
            record.settle(keep=_LAG)
        return state, FINISHED

    def _wants_stop(self, record: Record, request: StopRequest) -> bool:
        if self.should_stop is not None and record.latest and self.should_stop(record.latest):
            request.ask("should_stop")
        return bool(request)

    def _pause_after(self, number: int, state: TrainState, record: Record) -> None:
        """Validates and saves between two steps, where it is time to."""
        if self.validation is not None and _is_multiple(number, self.options.eval_every):
            self._validate(state, record)
        if _is_multiple(number, self.options.save_every):
            self._save(number, state, record)

    def _save(self, number: int, state: TrainState, record: Record) -> None:
        if self.save is not None:
            losses = dict(record.validation_curve[-1:])
            self.save(state, number, losses.get(number))

    def _validate(self, state: TrainState, record: Record) -> None:
        assert self.validation is not None
        record.stop_clock()
        is_first = not record.validation_curve
        with self.progress.phase("compiling the validation") if is_first else nullcontext():
            losses = (self.step.evaluate(state, batch)["loss"] for batch in self.validation())
            values = [float(loss) for loss in delayed(losses, _LAG)]
        if not values:
            raise ConfigError("validation gave no batch; give at least one, or no validation")
        record.validated(statistics.fmean(values))
        record.start_clock()

    def _finish(self, state: TrainState, record: Record, reason: str) -> None:
        record.stop_clock()
        record.close_window()
        if reason == FINISHED and self.validation is not None:
            self._validate(state, record)
        if reason == FINISHED or not _is_multiple(record.step, self.options.save_every):
            self._save(record.step, state, record)

    def _tell_signal(self, name: str) -> None:
        self.progress.note(f"{name}: stopping after this step (once more aborts)")


def _is_multiple(number: int, every: int) -> bool:
    """Whether it is time again; never where `every` is 0."""
    return every > 0 and number % every == 0


def delayed(items: Iterable[_T], lag: int) -> Iterator[_T]:
    """Yields the items in order, each only after `lag` more have been made.

    Args:
        items: what to yield; arrays that are still being computed, for instance.
        lag: how many to make ahead.

    Example:
        >>> list(delayed([1, 2, 3], lag=2))
        [1, 2, 3]
    """
    waiting: collections.deque[_T] = collections.deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > lag:
            yield waiting.popleft()
    yield from waiting
