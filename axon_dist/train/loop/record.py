"""Records a run: its metrics and their history, its use of time, and its result."""

from __future__ import annotations

import array
import collections
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeAlias

import jax

from axon_dist.core.typing import Array
from axon_dist.core.words import plural

from ...step.state import FLAG, OVERFLOW, SPIKE, NonfiniteLoss, TrainState, step_was_nonfinite
from .limits import FINISHED, INTERRUPTIONS, LoopOptions
from .progress import Progress, Status
from .writers import MetricWriter

INITIALIZE, COMPILE, DATA, DEVICES = "initialize", "compile", "data", "devices"
VALIDATE, SAVE, STEP, LOST, OTHER = "validation", "save", "step", "lost", "other"


class TimeSheet:
    """Sums the seconds of a run by kind of activity.

    Args:
        clock: returns the time in seconds; replaceable for tests.

    Example:
        >>> ticks = iter([0.0, 1.0, 4.0, 10.0])
        >>> sheet = TimeSheet(lambda: next(ticks))
        >>> with sheet.on(SAVE):
        ...     pass
        >>> sheet[SAVE], sheet.elapsed
        (3.0, 10.0)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._start = clock()
        self._seconds: dict[str, float] = collections.defaultdict(float)

    def __getitem__(self, kind: str) -> float:
        return self._seconds[kind]

    @property
    def elapsed(self) -> float:
        """Seconds since the sheet was created."""
        return self._clock() - self._start

    @contextmanager
    def on(self, kind: str) -> Iterator[None]:
        """Counts the time of the context under a kind."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(kind, self._clock() - start)

    def add(self, kind: str, seconds: float) -> None:
        """Adds seconds measured elsewhere."""
        self._seconds[kind] += seconds

    def by_kind(self, train_seconds: float) -> dict[str, float]:
        """Divides all seconds since the beginning among the kinds.

        Args:
            train_seconds: the total time from step to step; the part that is neither `data` nor
                `lost` is `step`.
        """
        named = (INITIALIZE, COMPILE, DATA, VALIDATE, SAVE, LOST)
        seconds = {kind: self[kind] for kind in named}
        seconds[STEP] = max(train_seconds - self[DATA] - self[LOST], 0.0)
        return {**seconds, OTHER: max(self.elapsed - sum(seconds.values()), 0.0)}


TRAIN, VALIDATION = "train", "validation"
"""Prefixes of the names of metrics."""

Curve: TypeAlias = tuple[tuple[int, float], ...]
"""Pairs of step and value."""


class _Curves:
    """The recorded metrics by kind and name, in 16 bytes for each number.

    A run may write a million records, and the status after every step shows the last record. So
    memory must be small, and the time of a step must not grow with the number of records.
    """

    def __init__(self, history: Iterable[Mapping[str, Any]] = ()) -> None:
        self._points: dict[tuple[str, str], tuple[array.array[int], array.array[float]]] = {}
        for row in history:
            for point in _points(row):
                self.add(*point)

    def add(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a step."""
        for name, value in metrics.items():
            steps, values = self._points.setdefault(
                (kind, name), (array.array("q"), array.array("d"))
            )
            steps.append(step)
            values.append(value)

    def names(self, kind: str) -> list[str]:
        """Returns the names of the metrics of a kind."""
        return [name for (own, name), (steps, _) in self._points.items() if own == kind and steps]

    def curve(self, kind: str, name: str) -> Curve:
        """Returns all steps and values of a metric."""
        return tuple(zip(*self._points.get((kind, name), ((), ())), strict=True))

    def last(self, kind: str, name: str) -> tuple[int, float] | None:
        """Returns the last step and value of a metric."""
        found = self._points.get((kind, name))
        return (found[0][-1], found[1][-1]) if found and found[0] else None

    def newest(self, kind: str) -> dict[str, float]:
        """Returns the metrics of a kind with their last values."""
        return {
            name: values[-1]
            for (own, name), (_, values) in self._points.items()
            if own == kind and values
        }

    def last_step(self, kind: str) -> int | None:
        """Returns the last step that has a metric of a kind."""
        steps = (own[-1] for (name, _), (own, _) in self._points.items() if name == kind and own)
        return max(steps, default=None)

    def scores(self, options: LoopOptions) -> list[tuple[int, float]]:
        """Returns the step and the score of every validation; a smaller score is better."""
        sign = -1 if options.best_mode == "max" else 1
        name = options.best_metric.removeprefix(f"{VALIDATION}/")
        return [(step, sign * value) for step, value in self.curve(VALIDATION, name)]

    def validations_since_best(self, options: LoopOptions) -> int:
        """Counts the validations since the best; ignores improvements below `min_delta`.

        A score that is not finite is never the best.
        """
        best = math.inf
        best_number = 0
        scores = [score for _, score in self.scores(options)]
        for number, score in enumerate(scores, 1):
            if math.isfinite(score) and score < best - options.min_delta:
                best = score
                best_number = number
        return len(scores) - best_number

    def misses_validation(self, options: LoopOptions, step: int) -> bool:
        """Whether the validation of a step is due by these options and has no result.

        Without any record, the state comes from the folder of another run, which may have validated
        it.
        """
        has_records = any(self.last_step(kind) is not None for kind in (TRAIN, VALIDATION))
        is_due = step >= options.num_steps or is_multiple(step, options.eval_every)
        return is_due and has_records and self.last_step(VALIDATION) != step

    def has_lost_patience(self, options: LoopOptions, step: int) -> bool:
        """Whether a run ends at a step because the validations up to it did not improve."""
        # A score of an earlier step was judged at that step.
        is_scored = [number for number, _ in self.scores(options)[-1:]] == [step]
        return (
            options.patience > 0
            and is_scored
            and is_multiple(step, options.eval_every)
            and self.validations_since_best(options) >= options.patience
        )

    def drop_after(self, step: int) -> None:
        """Drops the points after a step."""
        for steps, values in self._points.values():
            while steps and steps[-1] > step:
                steps.pop()
                values.pop()


class _Window:
    """The sums of the metrics since the last record, and the number of steps in them.

    Sums take the same bits whether or not they are saved in between.
    """

    def __init__(self) -> None:
        self._count = 0
        self._sums: dict[str, float] = {}
        self.has_news = False

    @property
    def is_empty(self) -> bool:
        """Whether no step is in the sums."""
        return self._count == 0

    def add(self, values: Mapping[str, float]) -> None:
        """Adds the metrics of a step."""
        # A resumed run may have other metrics than the run that saved the sums.
        if values.keys() != self._sums.keys():
            self.clear()
        self._count += 1
        self._sums = {name: self._sums.get(name, 0.0) + value for name, value in values.items()}
        self.has_news = True

    def means(self) -> dict[str, float]:
        """Returns the mean of every metric; `has_news` is false until the next step."""
        self.has_news = False
        return {name: value / self._count for name, value in self._sums.items()}

    def mean_loss(self) -> float | None:
        """Returns the mean loss; None without a step."""
        return self._sums["loss"] / self._count if self._count else None

    def clear(self) -> None:
        """Drops all steps."""
        self._count = 0
        self._sums = {}
        self.has_news = False

    def saved(self) -> dict[str, float]:
        """Returns the number of steps and their sums, to save with the state."""
        sums = {f"{_SUM}{name}": value for name, value in self._sums.items()}
        return {WINDOW_STEPS: self._count, **sums}

    def restore(self, saved: Mapping[str, float], most: int) -> None:
        """Takes the sums that were saved with a state.

        Args:
            saved: numbers of which some are those of `saved`; others are ignored.
            most: the number of steps between the last multiple of `log_every` and the state. Sums
                of more steps are dropped: they are those of a run with another `log_every`.
        """
        self.clear()
        if 0 < saved.get(WINDOW_STEPS, 0) <= most:
            self._count = int(saved[WINDOW_STEPS])
            self._sums = {
                name.removeprefix(_SUM): x for name, x in saved.items() if name.startswith(_SUM)
            }


WINDOW_STEPS = "window_steps"
"""The number of steps in the sums of the metrics since the last record."""
_SUM = "window_sum/"
"""Begins the names of these sums, before that of the metric."""
_RECENT_STEPS = 50
_COUNTS = "counts"
"""The kind of the counts of steps so far: going back to a step restores them like the curves."""
_SKIPPED, _OVERFLOWED = "skipped_steps", "overflowed_steps"
_FLAGS = {FLAG: None, SPIKE: _SKIPPED, OVERFLOW: _OVERFLOWED}
"""Metrics that are in no mean, and the counts that they add to every record."""


class MetricRecorder:
    """Receives metrics as device scalars, fetches them later, averages them and writes them.

    The clock runs from `start_clock` to `stop_clock`, and pauses in the context of `aside`, so that
    compiling, validating and saving are not counted as training.

    Args:
        options: length and cadence of the run, and the items of its throughput.
        first_step: steps of the state from which this call, or its last rollback, starts.
        writers: receive the records.
        progress: gets a status after every fetched step.
        device_bytes: bytes of the train state per device, for the status.
        utilization: maps items per second to the share of the hardware's peak, if that is known.
        skips: whether nonfinite steps are counted and omitted. If not, the first of them is stored
            as `nonfinite`, and later ones are ignored.
        tell: called with the number of steps taken, as a heartbeat for the watchdog.
        history: records written before the first step of this run, each with its `step` and
            metrics; the curves begin with them.
        facts: maps the number of steps taken, and the number of steps that changed the parameters,
            to further numbers of a record, such as the learning rate.
        data_facts: maps the number of batches of this call, up to those of the record, to further
            numbers of a record, such as the samples seen.
        sheet: sums the time of the run by kind.
        counts: the `counts` of the state that the run resumes from; those of the history may be
            older.
    """

    def __init__(
        self,
        options: LoopOptions,
        first_step: int,
        writers: Sequence[MetricWriter],
        progress: Progress,
        device_bytes: int,
        utilization: Callable[[float], float] | None,
        skips: bool,
        tell: Callable[[int], None],
        history: Iterable[Mapping[str, Any]],
        facts: Callable[[int, int], Mapping[str, float]],
        data_facts: Callable[[int], Mapping[str, float]],
        sheet: TimeSheet,
        counts: Mapping[str, float] = MappingProxyType({}),
    ):
        self.options = options
        self.writers = writers
        self.progress = progress
        self.device_bytes = device_bytes
        self.utilization = utilization
        self.skips = skips
        self._counted = {_SKIPPED} if skips else set[str]()
        self._facts = facts
        self._data_facts = data_facts
        # Up to a step, this call has used `step - self._before_batches` batches.
        self._before_batches = first_step
        self.sheet = sheet
        self._tell = tell
        self.step_seconds = array.array("d")
        # Train, data and device seconds, and the number of steps, at the last record.
        self._reported = (0.0, 0.0, 0.0, 0)
        self.nonfinite: NonfiniteLoss | None = None
        self._skipped: list[str] = []
        self.first_step = self.dispatched = self.step = first_step
        self.rollbacks = 0
        self._curves = _Curves(history)
        self._window = _Window()
        self._restore(first_step, counts)
        self.latest: dict[str, float] = {}
        self.validation: dict[str, float] = {}
        self.has_validated = False
        self.train_seconds = 0.0
        self._pending: collections.deque[tuple[int, Mapping[str, Array]]] = collections.deque()
        self._mark: float | None = None

    @property
    def skipped_steps(self) -> int:
        """The number of steps so far that were nonfinite or a spike, and so changed nothing."""
        return self._count(_SKIPPED)

    @property
    def num_updates(self) -> int:
        """The number of steps so far that changed the parameters."""
        return self.step - self.skipped_steps - self._count(_OVERFLOWED)

    @property
    def counts(self) -> dict[str, float]:
        """The numbers to save with the state.

        These are the numbers of steps so far without an update, by reason, and the sums of the
        metrics since the last record.
        """
        counts = {name: self._count(name) for name in (_SKIPPED, _OVERFLOWED)}
        return {**counts, **self._window.saved()}

    def _restore(self, step: int, counts: Mapping[str, float]) -> None:
        """Takes the `counts` that were saved with the state after a step."""
        skipped = {name: counts[name] for name in (_SKIPPED, _OVERFLOWED) if name in counts}
        self._curves.add(_COUNTS, step, skipped)
        self._window.restore(counts, step % self.options.log_every)

    def _count(self, name: str) -> int:
        last = self._curves.last(_COUNTS, name)
        return 0 if last is None else int(last[1])

    def _add_one(self, name: str) -> None:
        self._curves.add(_COUNTS, self.step, {name: self._count(name) + 1})

    @property
    def items_per_second(self) -> float | None:
        """The throughput over the whole time that the clock was running."""
        items = self.options.items_per_step
        if items is None or not self.train_seconds:
            return None
        return items * len(self.step_seconds) / self.train_seconds

    @property
    def _recent(self) -> Sequence[float]:
        """The seconds of the last steps."""
        return self.step_seconds[-_RECENT_STEPS:]

    def start_clock(self) -> None:
        """Starts counting training time."""
        self._mark = time.perf_counter()

    def stop_clock(self) -> None:
        """Waits until all steps taken have finished, then stops counting training time."""
        self.settle()
        self._mark = None

    @contextmanager
    def aside(self, kind: str) -> Iterator[None]:
        """Counts the time of the context under a kind instead of as training.

        No step may be running.
        """
        start = time.perf_counter()
        with self.sheet.on(kind):
            yield
        if self._mark is not None:
            self._mark += time.perf_counter() - start

    def add(self, metrics: Mapping[str, Array]) -> None:
        """Adds the metrics of the next step, which may still be running."""
        self.dispatched += 1
        self.heartbeat()
        self._pending.append((self.dispatched, metrics))

    def heartbeat(self) -> None:
        """Sends a heartbeat to the watchdog."""
        self._tell(self.dispatched)

    def settle(self, keep: int = 0) -> None:
        """Fetches all metrics but the newest `keep`; waits for their steps.

        Args:
            keep: the number of newest metrics to leave on the devices.
        """
        while len(self._pending) > keep:
            step, metrics = self._pending.popleft()
            with self.sheet.on(DEVICES):
                fetched = jax.device_get(dict(metrics))
            self._take(step, {name: float(value) for name, value in fetched.items()})

    def validated(self, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a validation after the last step."""
        self._curves.add(VALIDATION, self.step, metrics)
        means = {f"{VALIDATION}/{name}": value for name, value in metrics.items()}
        # `should_stop` is called once `latest` is not empty, and expects training metrics in it.
        self.latest = self.latest | means if self.latest else {}
        self.validation = means
        self.has_validated = True
        self._write(means)
        self.progress.update(self.status())

    @property
    def train_curve(self) -> Curve:
        """The step and the mean training loss of every record."""
        return self._curves.curve(TRAIN, "loss")

    @property
    def validation_curve(self) -> Curve:
        """The step and the loss of every validation."""
        return self._curves.curve(VALIDATION, "loss")

    def metric_curves(self) -> dict[str, tuple[Curve, Curve]]:
        """Returns the training and validation curves of every validated metric except the loss."""
        curve = self._curves.curve
        names = sorted({*self._curves.names(VALIDATION)} - {"loss"})
        return {name: (curve(TRAIN, name), curve(VALIDATION, name)) for name in names}

    def score_at(self, step: int) -> float | None:
        """Returns the score of a step; None if its last validation is older, or not finite."""
        score = dict(self._curves.scores(self.options)[-1:]).get(step, math.nan)
        return score if math.isfinite(score) else None

    @property
    def validations_since_best(self) -> int:
        """The number of validations since the best."""
        return self._curves.validations_since_best(self.options)

    @property
    def has_lost_patience(self) -> bool:
        """Whether the run ends here because the last validations did not improve."""
        return self._curves.has_lost_patience(self.options, self.step)

    @property
    def misses_validation(self) -> bool:
        """Whether the validation of the last step is due and has no result."""
        return self._curves.misses_validation(self.options, self.step)

    def go_back(self, step: int, counts: Mapping[str, float] = MappingProxyType({})) -> None:
        """Drops the records after a step; the run continues from there.

        Args:
            step: the number of steps that the state to continue from has taken.
            counts: the `counts` that were saved with it; those of the records may be older.
        """
        self._pending.clear()
        self._tell_skipped()
        if self._recent:
            self.sheet.add(LOST, statistics.fmean(self._recent) * (self.step - step))
        # The batches of the undone steps stay used, also those of steps that were still running.
        self._before_batches += step - self.dispatched
        self.first_step = self.dispatched = self.step = step
        self.nonfinite = None
        self.rollbacks += 1
        self._curves.drop_after(step)
        self._restore(step, counts)
        # A stop must not follow from undone steps: the next record is the first.
        self.latest = {}
        self.validation = {
            f"{VALIDATION}/{name}": value for name, value in self._curves.newest(VALIDATION).items()
        }
        self.start_clock()

    def close_window(self) -> None:
        """Writes the mean over the steps since the last record that was due, if there are any.

        A record written early, as after a signal, leaves its steps in the window. So the next
        regular record is the same as without it.
        """
        is_due = self.step % self.options.log_every == 0
        counts = {f"{TRAIN}/{name}": float(self._count(name)) for name in sorted(self._counted)}
        tells = self._tell_skipped()
        if self._window.is_empty or not (is_due or self._window.has_news):
            self._write(counts if tells else {})
            return
        means = self._window.means()
        if is_due:
            self._window.clear()
        self._curves.add(TRAIN, self.step, means)
        losses = {f"{TRAIN}/{name}": value for name, value in means.items()}
        given = {
            **self._facts(self.step, self.num_updates),
            **self._data_facts(self.step - self._before_batches),
        }
        # A schedule of optax gives a JAX scalar, which no writer of JSON takes.
        known = {name: float(value) for name, value in given.items()}
        now = losses | counts | self._speed() | self._shares() | known
        self.latest = now | self.validation
        self._write(now)

    def _take(self, step: int, values: dict[str, float]) -> None:
        lost = step_was_nonfinite(values)
        if self.nonfinite is None and lost and not self.skips:
            self.nonfinite = NonfiniteLoss(step, values["loss"])
        if self.nonfinite is not None:
            return
        if self._mark is not None:
            now = time.perf_counter()
            self.step_seconds.append(now - self._mark)
            self.train_seconds += now - self._mark
            self._mark = now
        self.step = step
        # Of independent replicas, the metric is the share that had a spike.
        if lost or values.get(SPIKE, 0) >= 0.5:
            self._add_one(_SKIPPED)
            why = f"step {step}: the loss {values['loss']:.4g} or its gradient is a spike"
            self._skipped.append(str(NonfiniteLoss(step, values["loss"])) if lost else why)
        else:
            self._window.add({n: x for n, x in values.items() if n not in _FLAGS})
            # Of replicas with a scale each, the metric is the share that overflowed.
            if values.get(OVERFLOW, 0) >= 0.5:
                self._add_one(_OVERFLOWED)
        # Spikes are counted under every policy for nonfinite steps, which `skips` is about.
        self._counted |= {name for flag, name in _FLAGS.items() if name and flag in values}
        if step % self.options.log_every == 0 or step == self.options.num_steps:
            self.close_window()
        self.progress.update(self.status())

    def _speed(self) -> dict[str, float]:
        if not self._recent:
            return {}
        seconds = statistics.fmean(self._recent)
        items = self.options.items_per_step
        speed = {"time/step_seconds": seconds}
        if items is not None:
            rate = speed[f"time/{self.options.item}_per_second"] = items / seconds
            if self.utilization is not None:
                speed["time/model_flops_utilization"] = self.utilization(rate)
        return speed

    def _shares(self) -> dict[str, float]:
        """Returns how the time since the last record, and of the whole run, was spent."""
        before = self._reported
        count = len(self.step_seconds)
        now = (self.train_seconds, self.sheet[DATA], self.sheet[DEVICES], count)
        self._reported = now
        train, data, devices = (now[index] - before[index] for index in range(3))
        shares = {"time/unix": time.time(), "time/elapsed_seconds": self.sheet.elapsed}
        if train <= 0:
            return shares
        # `time/step_seconds` is a mean over the recent steps, so include them in the slowest step.
        first_recent = count - len(self._recent)
        spent = self.sheet.by_kind(self.train_seconds)
        return {
            **shares,
            "time/slowest_step_seconds": max(self.step_seconds[min(before[3], first_recent) :]),
            "time/data_share": min(data / train, 1.0),
            "time/host_share": max(1 - (data + devices) / train, 0.0),
            "time/goodput": spent[STEP] / self.sheet.elapsed,
        }

    def _write(self, metrics: Mapping[str, float]) -> None:
        for writer in self.writers if metrics else ():
            writer.write(self.step, metrics)

    def _tell_skipped(self) -> bool:
        """Reports the steps skipped since the last record; returns whether there were any."""
        skipped = self._skipped
        self._skipped = []
        if skipped:
            count = f"{plural(len(skipped), 'step')} skipped, {self.skipped_steps} so far"
            self.progress.note(f"{count}; {skipped[0]}")
        return bool(skipped)

    def status(self) -> Status:
        """Returns the status of the run after its last fetched step."""
        speed = self._speed()
        item = self.options.item
        seconds = speed.get("time/step_seconds")
        steps_left = self.options.num_steps - self.step
        last = self._curves.last(TRAIN, "loss")
        recent = self._window.mean_loss()
        validated = self._curves.last(VALIDATION, "loss")
        validation_step, validation_loss = validated or (None, None)
        return Status(
            step=self.step,
            num_steps=self.options.num_steps,
            loss=last[1] if recent is None and last is not None else recent,
            validation_loss=validation_loss,
            validation_step=validation_step,
            items_per_second=speed.get(f"time/{item}_per_second"),
            item=item,
            step_seconds=seconds,
            seconds_left=seconds * steps_left if seconds and steps_left else None,
            device_bytes=self.device_bytes,
        )


def is_multiple(number: int, cadence: int) -> bool:
    """Whether `number` is a multiple of `cadence`; always false if `cadence` is 0."""
    return cadence > 0 and number % cadence == 0


def _points(row: Mapping[str, Any]) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yields kind, step and metrics of a record, for training, counts and validation."""
    for kind in (TRAIN, VALIDATION):
        metrics = {name: x for name, x in row.items() if name.startswith(f"{kind}/")}
        # Infinities and NaN were written as strings, which `float` reads.
        means = {name.removeprefix(f"{kind}/"): float(x) for name, x in metrics.items()}
        counts = {name: means.pop(name) for name in (_SKIPPED, _OVERFLOWED) if name in means}
        if counts and kind == TRAIN:
            yield _COUNTS, row["step"], counts
        if means:
            yield kind, row["step"], means


EARLY = "early stopping"
"""The reason of a run that ended early because validations did not improve."""


def reason_to_end(
    options: LoopOptions, step: int, history: Iterable[Mapping[str, Any]]
) -> str | None:
    """Returns why a resumed run has nothing left to do; None if a step or validation is left.

    A run whose last validation was aborted has that validation left.

    Args:
        options: length and cadence of the run.
        step: the number of steps that the state has taken.
        history: the records up to that step.

    Example:
        >>> options = LoopOptions(num_steps=9, eval_every=2, patience=1)
        >>> losses = {2: 1.0, 4: 1.5}
        >>> history = [{"step": step, "validation/loss": loss} for step, loss in losses.items()]
        >>> reason_to_end(options, 2, history[:1]), reason_to_end(options, 4, history)
        (None, 'early stopping')
    """
    curves = _Curves(history)
    if step > options.num_steps:
        return FINISHED
    if curves.misses_validation(options, step):
        return None
    if step >= options.num_steps:
        return FINISHED
    return EARLY if curves.has_lost_patience(options, step) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a run.

    Args:
        state: the state after the last step.
        num_steps: the number of steps that the state has taken.
        first_step: the number of steps that the state had taken before this call; seconds and
            throughput do not include them.
        reason: why the run ended: `finished`; `early stopping`; the text that the `should_stop` of
            the `Trainer` returned, or `should_stop`, if it returned true; `out of data`; the name
            of a signal, such as `SIGINT`; or `another process`, if another process had a reason to
            stop.
        train_curve: pairs of step and mean training loss.
        validation_curve: pairs of step and validation loss.
        metric_curves: the training and validation curves of every other validated metric of the
            loss function.
        compile_seconds: the time of the first step and of the first validation batch, which
            compile.
        train_seconds: the time of all later steps, without validations and saves.
        items_per_second: throughput over the train seconds; None if unknown.
        device_bytes: bytes of the train state on the fullest device.
        skipped_steps: the number of steps whose batch was dropped because the step was nonfinite or
            a spike, without those that a rollback undid.
        rollbacks: the number of times that the run went back to a checkpoint.
        seconds: the seconds of this call by kind: `initialize`, `compile`, `data` (waiting for a
            batch), `step`, `validation`, `save`, `lost` (steps undone by a rollback) and `other`.
        step_percentiles: percentiles of the seconds per step, by percent; empty if no step was
            timed.
    """

    state: TrainState
    num_steps: int
    reason: str
    device_bytes: int
    train_curve: Curve = ()
    validation_curve: Curve = ()
    compile_seconds: float = 0.0
    train_seconds: float = 0.0
    items_per_second: float | None = None
    first_step: int = 0
    skipped_steps: int = 0
    rollbacks: int = 0
    metric_curves: Mapping[str, tuple[Curve, Curve]] = dataclasses.field(default_factory=dict)
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    step_percentiles: Mapping[int, float] = dataclasses.field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        """Whether the run reached its last step."""
        return self.reason == FINISHED

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal, or a stop of another process, ended the run too early.

        That is before its last step, or before the result of the validation after that step.
        """
        return self.reason in INTERRUPTIONS
