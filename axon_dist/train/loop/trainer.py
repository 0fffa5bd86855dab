"""`Trainer` runs the training loop: it takes steps, validates, reports and stops cleanly."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import NoReturn, TypeAlias

import numpy as np

from axon_dist.core.errors import ConfigError, LaunchError, NonfiniteError, did_you_mean, warn
from axon_dist.core.own_context import in_own_context
from axon_dist.core.tree import own_bytes
from axon_dist.core.typing import Batch
from axon_dist.core.words import plural
from axon_dist.mesh import agree, from_main, watch_steps

from ...step import Nonfinite, TrainState, TrainStep
from ...step import state as step_state
from .limits import (
    BATCHES,
    FINISHED,
    KINDS,
    STATE,
    LoopOptions,
    StopConsensus,
    Stops,
    stop_on_signals,
)
from .meters import LAG, MetricSums, StepProfile, delayed, percentiles, utilization_of
from .progress import Progress, SilentProgress
from .record import (
    COMPILE,
    DATA,
    EARLY,
    INITIALIZE,
    SAVE,
    VALIDATE,
    MetricRecorder,
    TimeSheet,
    TrainResult,
    is_multiple,
)
from .writers import MetricWriter

ValidationSet: TypeAlias = Callable[[], Iterable[Batch]]
"""Makes the batches of one validation."""

_END_SECONDS = 30.0
"""How much later than the other processes a process may reach the end of its data, in seconds."""
_END = object()
"""Sentinel for the end of the batches, which no data can contain."""
NONFINITE = "nonfinite"
"""The reason of a run that ends with an error."""
_CAUSES = "Lower the learning rate, clip the gradients or look at the data"
_ADVICE = f"{_CAUSES}; nonfinite='skip' skips such batches, 'rollback' goes back to a checkpoint"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """The loop around a step: `for batch in batches: state, metrics = step(state, batch)`.

    Metrics are read two steps late. So two steps are queued on the devices while the host loads and
    places the next batch, and host and devices do not wait for each other; the host never runs
    further ahead.

    SIGINT (Ctrl-C), SIGTERM and SIGHUP end the run after the current step, or with several
    processes two steps later, with everything saved; a validation that has begun ends without a
    result. A later `fit` with that state, on a trainer whose `history` has this run's records,
    first runs this validation.

    The `nonfinite` option of the step handles a loss or gradient that is not finite. A step built
    without this option has already changed its state when this is detected: the run ends with an
    error, and that state is not saved.

    Args:
        step: the step, from `build_train_step`.
        batches: the batches for the step; the run ends early if they end.
        options: length and cadence of the run.
        validation: a function that returns the batches of one validation, of any sizes that the
            step accepts. Metrics are means over all samples, `sum(totals) / sum(weights)`, or sums
            of integers; see `TrainStep.evaluate_sums`. Or several such functions by name: the
            metrics of `""` are called `validation/loss`, those of a set `code` are called
            `validation/code/loss`. None for no validation.
        writers: receive the metrics. They stay open: close them after `fit`.
        progress: displays the progress of the run.
        should_stop: called before every step with the latest record of metrics, once there is one.
            The run ends on all processes once it returns true, or a text that gives the reason, on
            any of them; with several processes, two steps later. See below for the keys.
        save: `save(state, number, score)` is called between two steps. It gets the state, the
            number of steps taken, and the state's score by the `best_metric` of the options
            (smaller is better), or None if the state was not validated or the score is not finite.
            It must no longer use the arrays when it returns. It also gets the last state, unless
            the run ends with an error in a step. After a nonfinite step, it is called with the
            state before it, if that state still exists. The state has been trained on all batches
            that `batches` has returned by then, unless the run has gone back or stops at a
            nonfinite step; see `give_back`.
        copy: `copy(state, number)` copies a state to where it can be restored faster than from
            `save`; it must no longer use the arrays when it returns. It is called every
            `copy_every` steps, and with the last state of a run that ends early, but not after a
            nonfinite step.
        give_back: called before the last save of a run that stops at a nonfinite step, with the
            number of batches that were loaded after the state that is saved.
        go_back: returns the newest good state that was saved, or None if there is none; required
            if the step's `nonfinite` is `"rollback"`.
        earlier_counts: called after `go_back`; returns the numbers that `on_counts` got before that
            state was saved. If it is None or leaves out a number, that number comes from the last
            record up to that state, which may be older.
        is_saved: `is_saved(number)` returns whether the state after that many steps is saved; asked
            before the last save of a run that stops at a nonfinite step. None assumes that the
            state that `fit` gets is saved, and that `save` never fails.
        history: the records written before this call, up to the state that the run resumes from;
            the curves of the result begin with them. Those of process 0 determine when a run
            without improvement ends, and whether the state lacks a validation that is due, so the
            other processes need none.
        counts: the numbers that `on_counts` got last before the save of the state that the run
            resumes from. Numbers that are missing come from the last record of the history, which
            may be older.
        on_counts: called before `save` and `copy` with numbers to save with the state, in place of
            the earlier ones: `skipped_steps` and `overflowed_steps`, the steps so far without an
            update; `window_steps`, the steps since the last record; and `window_sum/<metric>`, the
            sums of their metrics, which a resumed run continues for its next record.
        facts: maps the number of steps taken, and the number of steps that changed the parameters,
            to further numbers of a record, such as the learning rate; runs on the host.
        data_facts: maps the number of batches that this call has taken steps with, including the
            steps that a rollback undid, to further numbers of a record, such as the samples seen;
            runs on the host.
        on_compiled: called once, after the first step, which compiles.
        profile_dir: the folder for traces. The options select traced steps, and SIGUSR1 traces the
            next `profile_steps` steps of the process that gets it.

    `should_stop` gets the newest training record: means over the last `log_every` steps. The newest
    validation is added to it; writers get a validation as a record of its own. It is
    not called before the first training record.

        train/loss, train/...             each metric of the step, such as `train/grad_norm`
        train/skipped_steps               number so far; if nonfinite steps or spikes are skipped
        train/overflowed_steps            further steps so far without an update, because gradients
                                          overflowed; with a loss scale
        time/step_seconds                 mean of recent steps; the first step is not timed
        time/tokens_per_second            with `items_per_step`; named after `item`
        time/model_flops_utilization      with `peak_flops`
        time/slowest_step_seconds         slowest of the steps since the last record, and of those
                                          that `time/step_seconds` averages
        time/data_share, time/host_share  shares of the time since the last record spent waiting
                                          for batches, and on the host without waiting
        time/goodput                      share of all time so far spent in steps not undone
        time/elapsed_seconds, time/unix   seconds since the call of `fit`, and Unix time
        validation/loss, validation/...   each metric of the last validation

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
        >>> result.reason, dict(result.train_curve)[20] < 0.01
        ('finished', True)
        >>> is_good = lambda record: record["train/loss"] < 0.5
        >>> options = LoopOptions(num_steps=20, log_every=1)
        >>> early = Trainer(step=step, batches=batches, options=options, should_stop=is_good).fit()
        >>> early.reason, early.num_steps < 20
        ('should_stop', True)
    """

    step: TrainStep
    batches: Iterable[Batch]
    options: LoopOptions
    validation: ValidationSet | Mapping[str, ValidationSet] | None = None
    writers: Sequence[MetricWriter] = ()
    progress: Progress = SilentProgress()
    should_stop: Callable[[Mapping[str, float]], bool | str] | None = None
    save: Callable[[TrainState, int, float | None], None] | None = None
    copy: Callable[[TrainState, int], None] | None = None
    give_back: Callable[[int], None] | None = None
    go_back: Callable[[], TrainState | None] | None = None
    earlier_counts: Callable[[], Mapping[str, float]] | None = None
    is_saved: Callable[[int], bool] | None = None
    history: Iterable[Mapping[str, object]] = ()
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    on_counts: Callable[[Mapping[str, float]], None] = dataclasses.field(default=lambda _: None)
    facts: Callable[[int, int], Mapping[str, float]] = dataclasses.field(default=lambda *_: {})
    data_facts: Callable[[int], Mapping[str, float]] = dataclasses.field(default=lambda _: {})
    on_compiled: Callable[[], None] = dataclasses.field(default=lambda: None)
    profile_dir: str | None = None

    @in_own_context
    def fit(self, state: TrainState | None = None) -> TrainResult:
        """Trains until the last step, the end of the data, or another reason to stop.

        A state whose validation is due and has no result is validated and saved first. No step
        follows if it is the last state, or the validations up to it have not improved for too long.

        Args:
            state: the state to continue from; None starts from `step.init()`. Its arrays are
                donated.

        Returns:
            The result, with the last state.

        Raises:
            ConfigError: when the options are invalid or need a function that the trainer lacks, or
                there is no batch or no step left.
            LaunchError: when the processes of a run have different options.
            NonfiniteError: when a loss or gradient is not finite, and the step was not built to
                skip it or roll back.
        """
        for name, kind in KINDS.items():
            kind.check("a Trainer", name, getattr(self, name))
        STATE.check("fit", "state", state)
        self.options.validate()
        self._check_functions()
        # A process that takes fewer steps would leave the others waiting for it.
        agree(self.step.world, "loop", dataclasses.asdict(self.options))
        sheet = TimeSheet()
        options = self.options
        profile = StepProfile(options.profile_at, options.profile_steps, self.profile_dir)
        with (
            self.progress,
            closing(profile),
            stop_on_signals(self._tell_signal) as request,
            profile.on_signal(self.progress.note),
            watch_steps(self.step.world) as tell,
        ):
            with self.progress.phase("initializing"), sheet.on(INITIALIZE):
                batches = iter(self.batches)
                first: Batch | object = _END
                if state is None:
                    first = self._first(batches)
                    self.step.check(first, own_rows=True)
                    state = self.step.init()
                recorder = self._recorder(state, tell, sheet)
            first_step = recorder.first_step
            stops = Stops(StopConsensus(self.step.world), request, self.should_stop)
            reason = self._catch_up(state, recorder, stops)
            if reason is None:
                if first is _END:
                    with sheet.on(INITIALIZE):
                        first = self._first(batches)
                state, reason = self._steps(state, first, batches, recorder, stops, profile)
                reason = self._finish(state, recorder, reason, stops)
        return TrainResult(
            state=state,
            first_step=first_step,
            num_steps=recorder.step,
            reason=reason,
            train_curve=recorder.train_curve,
            validation_curve=recorder.validation_curve,
            compile_seconds=sheet[COMPILE],
            train_seconds=recorder.train_seconds,
            items_per_second=recorder.items_per_second,
            device_bytes=recorder.device_bytes,
            skipped_steps=recorder.skipped_steps,
            rollbacks=recorder.rollbacks,
            metric_curves=recorder.metric_curves(),
            seconds=sheet.by_kind(recorder.train_seconds),
            step_percentiles=percentiles(recorder.step_seconds),
        )

    def _recorder(
        self, state: TrainState, tell: Callable[[int], None], sheet: TimeSheet
    ) -> MetricRecorder:
        options = self.options
        return MetricRecorder(
            options,
            int(state.step),
            self.writers,
            self.progress,
            own_bytes(state, self.step.world.is_cpu),
            utilization_of(self.step, options.peak_flops, options.sequence_length),
            self._policy is Nonfinite.SKIP,
            tell,
            self.history,
            self.facts,
            self.data_facts,
            sheet,
            self.counts,
        )

    @property
    def _policy(self) -> Nonfinite | None:
        return self.step.options.nonfinite

    def _check_functions(self) -> None:
        if self._policy is Nonfinite.ROLLBACK and self.go_back is None:
            raise ConfigError(
                "the step was built with nonfinite='rollback', but the trainer has no go_back; "
                "give it a function that returns the newest saved state, or build the step with "
                "nonfinite='stop' or 'skip'",
                code="no-go-back",
            )
        needed = {"save": "save_every", "copy": "copy_every", "validation": "eval_every"}
        for name, option in needed.items():
            steps = getattr(self.options, option)
            if steps and getattr(self, name) is None:
                raise ConfigError(
                    f"the options have {option}={steps}, but the trainer has no {name} function; "
                    f"give it one, or leave {option} at 0",
                    code="no-function",
                )

    def _first(self, batches: Iterator[Batch]) -> Batch:
        first = next(batches, _END)
        if first is _END:
            raise ConfigError("there is no batch to train on; give the trainer at least one")
        return first

    def _catch_up(self, state: TrainState, recorder: MetricRecorder, stops: Stops) -> str | None:
        """Makes up for a validation that was aborted; returns why no step follows, if none does.

        No batch may be loaded before, because the position in the data is saved with the state.
        """
        number = recorder.step
        if number == 0:
            return None
        # Only process 0 of a resumed run has the validations from before this call.
        if self.validation is not None and from_main(np.bool_(recorder.misses_validation)):
            has_result = self._validate(state, recorder, stops)
            # The first step compiles, which is not training time.
            recorder.stop_clock()
            # Also without a result: this run's folder may lack the state that the run resumed from.
            self._save(number, state, recorder)
            if not has_result:
                return stops.reason
            if number >= self.options.num_steps:
                return FINISHED
        if number >= self.options.num_steps:
            raise ConfigError(
                f"the state has taken {number} steps, but the run ends at step "
                f"{self.options.num_steps}; raise the number of steps",
                code="no-step-left",
            )
        return EARLY if self._has_lost_patience(recorder) else None

    def _end_together(self, number: int) -> None:
        """Raises if the data of this process ended, but not the data of the others.

        The others then wait in the next step forever, so only a timeout can detect it.
        """
        world = self.step.world
        try:
            agree(world, f"end of data after step {number}", {}, _END_SECONDS)
        except LaunchError:
            raise ConfigError(
                f"the batches of process {world.process_index} ended after step {number} of "
                f"{self.options.num_steps}, but the other processes have more; give every process "
                "the same number of batches",
                code="uneven-data",
            ) from None

    def _steps(
        self,
        state: TrainState,
        first: Batch,
        batches: Iterator[Batch],
        recorder: MetricRecorder,
        stops: Stops,
        profile: StepProfile,
    ) -> tuple[TrainState, str]:
        """Takes the first step, which compiles, and all others.

        Returns:
            The last state, and the reason it ended.
        """
        with self.progress.phase("compiling the train step"), recorder.sheet.on(COMPILE):
            state, metrics = self.step(state, first)
            recorder.add(metrics)
            recorder.settle()
        self.on_compiled()
        recorder.start_clock()
        options = self.options
        cadences = options.eval_every, options.save_every, options.copy_every, options.num_steps
        while True:
            if any(is_multiple(recorder.dispatched, cadence) for cadence in cadences):
                # Check that the state is finite before it is validated, saved or returned.
                recorder.settle()
            if recorder.nonfinite is not None:
                earlier = self._go_back(recorder)
                if earlier is None:
                    return state, NONFINITE
                state = earlier
                metrics = {}
                if recorder.dispatched >= self.options.num_steps:
                    return state, FINISHED
            elif recorder.dispatched >= self.options.num_steps:
                return state, FINISHED
            elif self._pause_after(recorder.dispatched, state, recorder, stops):
                return state, stops.reason
            elif self._has_lost_patience(recorder):
                return state, EARLY
            if stops.between_steps(recorder.latest):
                return state, stops.reason
            with recorder.sheet.on(DATA):
                batch = next(batches, _END)
            if batch is _END:
                self._end_together(recorder.dispatched)
                return state, "out of data"
            recorder.heartbeat()
            with profile.around(recorder.dispatched + 1, recorder.settle):
                state, metrics = self.step(state, batch, metrics.get(step_state.FLAG))
                recorder.add(metrics)
            recorder.settle(keep=LAG)

    def _go_back(self, recorder: MetricRecorder) -> TrainState | None:
        """Returns the state to continue from after a step that was not finite; None to stop."""
        limit = self.options.max_rollbacks
        if self._policy is not Nonfinite.ROLLBACK or recorder.rollbacks == limit:
            return None
        assert self.go_back is not None
        state = self.go_back()
        if state is None:
            return None
        # `recorder.go_back` clears it.
        nonfinite = recorder.nonfinite
        number = int(state.step)
        recorder.go_back(number, {} if self.earlier_counts is None else self.earlier_counts())
        self.progress.note(
            f"{nonfinite}: went back to step {number}, continuing with the next batches "
            f"(rollback {recorder.rollbacks} of {limit})"
        )
        return state

    def _pause_after(
        self, number: int, state: TrainState, recorder: MetricRecorder, stops: Stops
    ) -> bool:
        """Validates, saves and copies if they are due; returns whether to stop."""
        has_stopped = False
        if self.validation is not None and is_multiple(number, self.options.eval_every):
            has_stopped = not self._validate(state, recorder, stops)
        if is_multiple(number, self.options.save_every):
            self._save(number, state, recorder)
        if is_multiple(number, self.options.copy_every):
            self._copy(number, state, recorder)
        return has_stopped

    def _has_lost_patience(self, recorder: MetricRecorder) -> bool:
        """Whether the last validations did not improve; the same answer on every process."""
        options = self.options
        if not options.patience or not is_multiple(recorder.dispatched, options.eval_every):
            return False
        # Only process 0 of a resumed run has the validations from before this call.
        has_lost = bool(from_main(np.bool_(recorder.has_lost_patience)))
        if has_lost:
            since = plural(recorder.validations_since_best, "validation")
            self.progress.note(f"{options.best_metric} was best {since} ago: stopping early")
        return has_lost

    def _copy(self, number: int, state: TrainState, recorder: MetricRecorder) -> None:
        if self.copy is not None:
            self._check_finite(number, state)
            with recorder.aside(SAVE):
                self.on_counts(recorder.counts)
                self.copy(state, number)

    def _check_finite(self, number: int, state: TrainState) -> None:
        if self._policy is None and not step_state.is_finite(state):
            raise NonfiniteError(f"the parameters after step {number} are not finite. {_ADVICE}")

    def _save(self, number: int, state: TrainState, recorder: MetricRecorder) -> None:
        if self.save is not None:
            self._check_finite(number, state)
            with recorder.aside(SAVE):
                self.on_counts(recorder.counts)
                self.save(state, number, recorder.score_at(number))

    def _save_before_error(
        self, failure: Exception, state: TrainState, recorder: MetricRecorder
    ) -> None:
        """Saves the last state after an error of a validation, if every process has it.

        Otherwise the others are still validating, and never write their parts of the state.
        """
        if self.save is None:
            return
        number, world = recorder.step, self.step.world
        if world.num_processes > 1:
            # Not a note of `progress`, which only process 0 shows. Where warnings are errors, the
            # state is still saved, and the error of the validation raised.
            with contextlib.suppress(Warning):
                warn(
                    f"the validation after step {number} failed on process {world.process_index}, "
                    f"which waits up to {_END_SECONDS:g} s for the others to save the state, and "
                    f"then raises {type(failure).__name__}: {failure}",
                    code="validation-failed",
                )
        try:
            agree(world, f"failed validation after step {number}", {}, _END_SECONDS)
            self._save(number, state, recorder)
        except Exception as error:  # the error of the validation must reach the caller
            self.progress.note(f"the state of step {number} is not saved: {error}")

    def _validate(self, state: TrainState, recorder: MetricRecorder, stops: Stops) -> bool:
        """Validates; returns False if the run must stop, so that there is no result."""
        recorder.stop_clock()
        compiled = recorder.sheet[COMPILE]
        with recorder.sheet.on(VALIDATE):
            try:
                means = self._validation_means(state, recorder, stops)
            except Exception as error:
                self._save_before_error(error, state, recorder)
                raise
        # Compiling inside this context is counted as COMPILE, so subtract it from VALIDATE.
        recorder.sheet.add(VALIDATE, compiled - recorder.sheet[COMPILE])
        if means is None:
            return False
        recorder.validated(means)
        recorder.start_clock()
        return True

    def _validation_means(
        self, state: TrainState, recorder: MetricRecorder, stops: Stops
    ) -> dict[str, float] | None:
        validation = self.validation
        means = {}
        assert validation is not None
        sets = validation if isinstance(validation, Mapping) else {"": validation}
        for name, make in sets.items():
            is_first = not recorder.has_validated and not means
            set_means = self._means_of(make, is_first, state, recorder, stops)
            if set_means is None:
                return None
            means |= {f"{name}/{metric}".lstrip("/"): mean for metric, mean in set_means.items()}
        best = self.options.best_metric.removeprefix("validation/")
        if best not in means and (self.options.patience or best != "loss"):
            hint = did_you_mean(best, means)
            raise ConfigError(f"best_metric: the validation has no metric {best!r}.{hint}")
        return means

    def _means_of(
        self,
        make: ValidationSet,
        is_first: bool,
        state: TrainState,
        recorder: MetricRecorder,
        stops: Stops,
    ) -> dict[str, float] | None:
        """Computes the mean of every metric over one set; None if the run must stop."""
        sums = MetricSums()
        source = make()
        BATCHES.check("a Trainer", "validation()", source)
        batches = (recorder.heartbeat() or batch for batch in source)
        averages = self.step.options.ema is not None
        batch_sums = (self.step.evaluate_sums(state, batch, ema=averages) for batch in batches)
        with ExitStack() as compiling:
            if is_first:
                compiling.enter_context(self.progress.phase("compiling the validation"))
                compiling.enter_context(recorder.sheet.on(COMPILE))
            first = [*itertools.islice(batch_sums, 1)]
        for metrics in delayed(itertools.chain(first, batch_sums), LAG):
            sums.add(metrics)
            recorder.heartbeat()
            if stops.meanwhile():
                self.progress.note(
                    f"{stops.reason}: aborted the validation after step {recorder.step}"
                )
                return None
        if not sums.means:
            raise ConfigError(
                "validation gave no batch; give at least one, or set validation=None",
                code="no-validation-batch",
            )
        return sums.means

    def _finish(
        self, state: TrainState, recorder: MetricRecorder, reason: str, stops: Stops
    ) -> str:
        """Validates and saves the last state; returns the reason why the run ended."""
        recorder.stop_clock()
        recorder.close_window()
        if recorder.nonfinite is not None:
            self._stop_before(recorder.nonfinite, state, recorder)
        if reason != FINISHED:
            if not is_multiple(recorder.step, self.options.copy_every):
                self._copy(recorder.step, state, recorder)
            if not is_multiple(recorder.step, self.options.save_every):
                self._save(recorder.step, state, recorder)
            return reason
        if self.validation is not None and not self._validate(state, recorder, stops):
            # The run is not finished without this validation. A resumed run starts with it.
            reason = stops.reason
        self._save(recorder.step, state, recorder)
        return reason

    def _stop_before(
        self, nonfinite: step_state.NonfiniteLoss, state: TrainState, recorder: MetricRecorder
    ) -> NoReturn:
        """Ends a run after a nonfinite step; saves the last finite state, if it still exists."""
        remark, outcome = "", ""
        if self._policy is not None:
            remark = f"; the state is that of step {recorder.step}"
            if self.give_back is not None:
                self.give_back(recorder.dispatched - recorder.step)
            outcome = "is saved"
            if not self._has_saved(recorder):
                self._save(recorder.step, state, recorder)
                # A save that fails is told, and does not raise.
                has_failed = self.is_saved is not None and not self.is_saved(recorder.step)
                outcome = "could not be saved" if has_failed else "is saved now"
        rollbacks = f" after {recorder.rollbacks} rollbacks" if recorder.rollbacks else ""
        raise NonfiniteError(f"{nonfinite}{rollbacks}{remark}. {self._advice(recorder, outcome)}")

    def _advice(self, recorder: MetricRecorder, outcome: str) -> str:
        """Says what to do after a nonfinite step from which the run could not continue.

        Args:
            recorder: the recorder of the run.
            outcome: what became of the last finite state.
        """
        limit = self.options.max_rollbacks
        if self._policy is not Nonfinite.ROLLBACK:
            return _ADVICE
        if recorder.rollbacks == limit:
            return (
                f"max_rollbacks={limit} allows no more. {_CAUSES}; raise max_rollbacks, or let "
                "nonfinite='skip' skip such batches"
            )
        if recorder.step == 0 or self.save is None:
            return (
                "nonfinite='rollback' found no checkpoint to go back to. "
                f"{_CAUSES}; nonfinite='skip' needs no checkpoint"
            )
        found = f"nonfinite='rollback' found no checkpoint to go back to; that state {outcome}"
        if outcome == "could not be saved":
            return f"{found}. {_CAUSES}; make room for checkpoints, or name another folder"
        return (
            f"{found}. Resume the run, as --resume auto does: it goes back to that state and "
            "continues with the next batches. Save more often to go back without a restart"
        )

    def _has_saved(self, recorder: MetricRecorder) -> bool:
        """Whether the last finite state is saved, or is that of a new run."""
        if recorder.step == 0:
            return True
        if self.is_saved is not None:
            return self.is_saved(recorder.step)
        is_first = recorder.step == recorder.first_step
        return is_first or is_multiple(recorder.step, self.options.save_every)

    def _tell_signal(self, name: str) -> None:
        self.progress.note(f"{name}: stopping after this step (a second signal aborts)")
