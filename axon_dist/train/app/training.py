"""`train` executes a whole run, from a config to a folder with its results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
from jax.errors import JaxRuntimeError
from rich.console import Console

from axon_dist.checkpoint import CheckpointManager, on_main
from axon_dist.core.checks import checked
from axon_dist.core.errors import (
    CheckpointError,
    ConfigError,
    NonfiniteError,
    OutOfMemoryError,
    install_command,
)
from axon_dist.core.files import replacing
from axon_dist.core.tree import own_bytes
from axon_dist.core.typing import JsonDict
from axon_dist.core.words import AUTO, byte_size, plural, printable
from axon_dist.step import TrainState
from axon_dist.train.loop import (
    FINISHED,
    JsonlWriter,
    MetricWriter,
    MlflowWriter,
    Progress,
    PrometheusWriter,
    TensorBoardWriter,
    TolerantWriter,
    TrackioWriter,
    Trainer,
    TrainResult,
    WandbWriter,
    has_module,
    make_progress,
    plot_losses,
    reason_to_end,
)

from ...core.own_context import in_own_context
from ..config import CONFIG, Logger, Mlflow, Prometheus, RunConfig, TensorBoard, Trackio, Wandb
from .config_plans import plan_here
from .directory import PastMetrics, RunDirectory, create_directory, directory_at, take_folders
from .examine import program_record
from .resume import SavedStates, check_copies, check_resume, keep_programs, open_states
from .run_records import END, START
from .runs import Run, build_run, compiling_ahead
from .summary import opening_lines, summarize, summary_table


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of `train`.

    Args:
        result: the result of the training loop, with the last state.
        directory: the folder of the run, with everything else.
        summary: the contents of `summary.json`.
    """

    result: TrainResult
    directory: RunDirectory
    summary: JsonDict


@in_own_context
@checked(config=CONFIG)
def train(
    config: RunConfig,
    console: Console | None = None,
    resume: str | None = None,
    *,
    began: float | None = None,
) -> RunResult:
    """Trains the run that a config describes, and writes its results into a folder.

    Process 0 writes `config.yaml`, `metrics.jsonl`, `program.json` with the costs of the compiled
    step, `summary.json`, and `loss.png` if matplotlib is installed. Every process writes its part
    of `checkpoints/`. All files are also written when Ctrl-C ends the run. A run that is stopped at
    any point and resumed gives the same bits as an uninterrupted run.

    Args:
        config: a checked run, as YAML describes it.
        console: where process 0 reports progress; None for no output.
        resume: `"auto"`, or a path to resume from; None for a new run; see `SavedStates`.
        began: the `time.perf_counter` reading from which the seconds of the run are counted, for
            example at the start of the process; None for the time of this call.

    Returns:
        The result.

    Raises:
        AxonDistError: before anything is compiled, when the config is invalid.
        OutOfMemoryError: when a device runs out of memory; the message suggests changes.
        NonfiniteError: when a loss or gradient is not finite and `train.nonfinite` is `stop`.
        CheckpointError: when there is no good checkpoint to resume from; or, after everything else
            is written, when the last state could not be saved.
    """
    began = time.perf_counter() if began is None else began
    check_copies(config, os.environ, resume)
    console = Console(quiet=True) if console is None else console
    keep_programs(functools.partial(_print_line, console))
    run = build_run(config)
    run.check_weights(resume)
    on_main(lambda: check_resume(resume))
    console = console if run.is_main else Console(quiet=True)
    tell = functools.partial(_print_line, console)
    directory = directory_at(
        Path(on_main(lambda: str(create_directory(config, resume).path))), config
    )
    for line in [*opening_lines(run), *_open_port(run), f"run directory: {directory.place}"]:
        tell(line)
    with contextlib.ExitStack() as stack:
        on_main(lambda: take_folders(config, directory, stack, tell))
        saved = open_states(run, directory, os.environ, tell)
        state, told = _start(saved, resume, tell)
        ended = None if state is None else _why_ended(run, directory, int(state.step))
        if state is not None and ended is not None:
            tell(_finished_line(config, int(state.step), ended))
            return _finished_already(run, directory, state, ended, tell, saved.counts)
        history = _prepare_records(config, directory, state, tell, told) if run.is_main else ()
        on_main(directory.copy)
        first_step = 0 if state is None else int(state.step)
        state = run.first_state(tell) if state is None else state
        progress = make_progress(console, config.name)
        with contextlib.ExitStack() as inner:
            writers = _open_writers(inner, run, directory, first_step, progress.note)
            checkpoints = inner.enter_context(saved.checkpoints)
            checkpoints.tell = progress.note
            ahead = compiling_ahead(config, run.world, os.environ, progress.note)
            keep = _record_program(run, directory, progress, inner.enter_context(ahead))
            trainer = run.trainer(
                progress,
                writers,
                saved.save,
                copy=None if saved.copies is None else saved.copy,
                go_back=saved.go_back,
                earlier_counts=lambda: dict(saved.counts),
                is_saved=saved.is_saved,
                history=history,
                counts=dict(saved.counts),
                on_counts=saved.take_counts,
                on_compiled=keep,
                profile_dir=str(directory.profile),
            )
            with explained(run, directory.path):
                loop_began = time.perf_counter()
                result = _fit(trainer, state, checkpoints)
        summary = _write_results(run, result, directory, tell, began, loop_began)
        # Wait for process 0: a scheduler may kill the other processes as soon as one exits.
        on_main(lambda: None)
        _print_closing(console, result, summary, directory)
        if checkpoints.failure is not None:
            raise CheckpointError(f"the last state is not saved: {checkpoints.failure}")
        _check_not_removed(config, directory, writers)
    return RunResult(result, directory, summary)


def _write_results(
    run: Run,
    result: TrainResult,
    directory: RunDirectory,
    tell: Callable[[str], None],
    began: float,
    loop_began: float,
) -> JsonDict:
    """Writes the summary and the curves of a run; returns the contents of the summary.

    Args:
        run: the run.
        result: the result of its training loop.
        directory: the folder of the files.
        tell: called with a message about each file that cannot be written.
        began: when the run began, as a `time.perf_counter` reading.
        loop_began: when its training loop began, as a `time.perf_counter` reading.
    """
    summary = summarize(run, result)
    seconds = {START: loop_began - began, **summary["seconds"]}
    if run.is_main:
        first = {**summary, "seconds": seconds}
        _record(directory.summary, tell, lambda: directory.write_summary(first))
        _record(directory.plot, tell, lambda: _plot(run, result, directory))
    # Write the summary again, now including the seconds of the plot, so that the report and the
    # table show the same time.
    spent = sum(seconds.values())
    summary["seconds"] = {**seconds, END: max(time.perf_counter() - began - spent, 0.0)}
    if run.is_main:
        _record(directory.summary, tell, lambda: directory.write_summary(summary))
    return summary


def _open_port(run: Run) -> list[str]:
    """Starts the profiler server of this process at the port of the config."""
    profile = run.config.train.profile
    if profile is None or profile.port is None:
        return []
    port = profile.port + run.world.process_index
    jax.profiler.start_server(port)
    return [f"profile: XProf and TensorBoard can trace process 0 at localhost:{port}"]


def _start(
    saved: SavedStates, resume: str | None, tell: Callable[[str], None]
) -> tuple[TrainState | None, list[str]]:
    """Returns the state that a run resumes from, or None, and the messages about it."""
    told: list[str] = []

    def tell_and_keep(line: str) -> None:
        told.append(line)
        tell(line)

    return saved.find_start(resume, tell_and_keep), told


def _prepare_records(
    config: RunConfig,
    directory: RunDirectory,
    state: TrainState | None,
    tell: Callable,
    told: Sequence[str],
) -> PastMetrics:
    """Prepares the records of a new or resumed run: reports config changes, and writes the config.

    Removes an old summary, and returns the metrics up to the state's step.
    """
    for line in (f"config: {change}" for change in directory.changes(config)):
        if line not in told:
            tell(line)
    _record(directory.config, tell, lambda: directory.write_config(config))
    # The summary from before the run was resumed does not cover the steps that follow.
    _record(directory.summary, tell, lambda: directory.summary.unlink(missing_ok=True))
    return directory.take_metrics(0 if state is None else int(state.step), tell)


def _record(path: Path, tell: Callable[[str], None], write: Callable[[], object]) -> None:
    """Writes a record of a run; reports a disk error instead of ending the run."""
    try:
        write()
    except OSError as error:
        tell(f"{path.name} is not written: {error.strerror or error}")


def _check_not_removed(
    config: RunConfig, directory: RunDirectory, writers: Sequence[MetricWriter]
) -> None:
    """Raises `ConfigError` if the files of a run were removed while it ran."""
    if any(isinstance(writer, JsonlWriter) and writer.was_removed for writer in writers):
        with contextlib.suppress(OSError):
            directory.write_config(config)
        raise ConfigError(
            f"{str(directory.path)!r} was removed or emptied while the run was writing to it; "
            "earlier records are lost, later ones exist",
            code="folder-removed",
        )


def _record_program(
    run: Run, directory: RunDirectory, progress: Progress, then: Callable[[], None]
) -> Callable[[], None]:
    """Returns the callback after the first step.

    On process 0 it writes `program.json` and calls `then`; on others it does nothing.
    """

    def keep() -> None:
        if not run.is_main:
            return
        with progress.phase("reading the compiled step"):
            try:
                program = program_record(run)
                directory.write_program(program)
                for warning in program["warnings"]:
                    progress.note(warning)
            except Exception as error:  # a failed report must not end the run
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                progress.note(f"{directory.program.name} is not written: {reason}")
        then()

    return keep


def _fit(trainer: Trainer, state: TrainState | None, checkpoints: CheckpointManager) -> TrainResult:
    try:
        return trainer.fit(state)
    except NonfiniteError:
        # Every process stops at the same step, so that they can finish their last save together.
        checkpoints.wait()
        raise


def _why_ended(run: Run, directory: RunDirectory, step: int) -> str | None:
    """Returns why the run has nothing left to do after a step; None if steps are left."""
    # Only process 0 has the records of the run.
    past = PastMetrics(directory.metrics, step)
    return on_main(lambda: reason_to_end(run.loop_options(), step, past))


def _finished_line(config: RunConfig, step: int, reason: str) -> str:
    """Describes why a resumed run has nothing left to do."""
    done = f"{step} of {config.train.steps} steps are done"
    if reason == FINISHED:
        return f"finished already: {done}"
    best = config.train.best
    return (
        f"finished already: {done}, and {best.metric} did not improve in the last "
        f"{plural(best.patience, 'validation')}; raise train.best.patience to continue"
    )


def _finished_already(
    run: Run,
    directory: RunDirectory,
    state: TrainState,
    reason: str,
    tell: Callable[[str], None],
    counts: Mapping[str, float],
) -> RunResult:
    """Returns the result of a run with no step left; writes its summary if that is missing."""
    result = TrainResult(
        state=state,
        num_steps=int(state.step),
        reason=reason,
        device_bytes=own_bytes(state, run.world.is_cpu),
        skipped_steps=int(counts.get("skipped_steps", 0)),
    )
    summary = summarize(run, result)
    if run.is_main:
        _record(directory.summary, tell, lambda: directory.write_missing(run.config, summary))
    return RunResult(result, directory, summary)


def _open_writers(
    stack: contextlib.ExitStack,
    run: Run,
    directory: RunDirectory,
    first_step: int,
    tell: Callable[[str], None],
) -> list[MetricWriter]:
    """Opens the metric writers of process 0, until `stack` is closed."""
    writers = _writers(run.config, directory, first_step, tell) if run.is_main else ()
    return [stack.enter_context(contextlib.closing(writer)) for writer in writers]


def _writers(
    config: RunConfig, directory: RunDirectory, first_step: int, tell: Callable[[str], None]
) -> Iterator[MetricWriter]:
    """Opens the metric writers one by one: the run's own, then the loggers of the config."""
    yield JsonlWriter(directory.metrics, tell)
    for logger in config.loggers:
        key = _tracker_key(logger)
        run_id = directory.tracker_runs().get(key)
        writer = _open_writer(logger, config, directory.path, first_step, run_id)
        if isinstance(writer, (WandbWriter, TrackioWriter, MlflowWriter)):
            keep = functools.partial(directory.write_tracker_run, key, writer.run_id)
            _record(directory.trackers, tell, keep)
        yield TolerantWriter(writer, type(logger).__name__, tell)


def _tracker_key(logger: Logger) -> str:
    """Names a tracker and its project; the run of another project cannot be continued."""
    project = getattr(logger, "project", getattr(logger, "experiment", ""))
    return f"{type(logger).__name__.lower()}/{project}"


def _open_writer(
    logger: Logger, config: RunConfig, folder: Path, first_step: int, run_id: str | None
) -> MetricWriter:
    """Opens the writer of a logger.

    Args:
        logger: the logger of the config.
        config: the config of the run.
        folder: the folder of the run.
        first_step: the number of steps taken before.
        run_id: the run of the tracker to continue; None for a new one.
    """
    name = config.name
    plain = config.to_dict()
    path = str(logger.path(folder))
    match logger:
        case TensorBoard():
            return TensorBoardWriter(path, first_step)
        case Wandb(project=project, mode=mode):
            return WandbWriter(
                folder, project=project, name=name, mode=mode, config=plain, run_id=run_id
            )
        case Trackio(project=project):
            return TrackioWriter(project=project, name=name, config=plain, run_id=run_id)
        case Mlflow(experiment=experiment, uri=uri):
            uri = uri or f"sqlite:///{Path(path).resolve()}"
            return MlflowWriter(uri, experiment=experiment, name=name, config=plain, run_id=run_id)
        case Prometheus(port=port):
            return PrometheusWriter(path, run=name, port=port)
    raise TypeError(f"no writer for the logger {logger}; add one here")


def _plot(run: Run, result: TrainResult, directory: RunDirectory) -> None:
    if has_module("matplotlib"):
        title = f"{run.config.name}: {run.step.strategy.name} on {run.world.spec}"
        losses = result.train_curve, result.validation_curve
        plot_losses(directory.plot, *losses, run.unit, title, result.metric_curves)


def _print_line(console: Console, line: str) -> None:
    # In a log, keep each line whole; on a terminal, wrap it between words.
    wrap = not console.is_terminal
    console.print(printable(line), soft_wrap=wrap, highlight=False, markup=False)


def _print_closing(
    console: Console,
    result: TrainResult,
    summary: dict[str, object],
    directory: RunDirectory,
) -> None:
    console.print(summary_table(summary))
    plot = f"none ({install_command('plots')})"
    if directory.plot.exists():
        plot = directory.place / directory.plot.name
    _print_line(console, f"run directory: {directory.place}")
    _print_line(console, f"loss curves: {plot}")
    if result.is_interrupted:
        _print_line(console, "--resume auto continues this run")


@contextlib.contextmanager
def explained(run: Run, folder: Path) -> Iterator[None]:
    """Turns an out-of-memory error of JAX into one that suggests changes.

    Args:
        run: the run.
        folder: where to write the memory profile.

    Raises:
        OutOfMemoryError: instead of JAX's error.
    """
    try:
        yield
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        place = str(RunDirectory(folder).memory)
        profiled = []
        with contextlib.suppress(OSError, RuntimeError):
            with replacing(Path(place), durable=False) as file:
                file.write(jax.profiler.device_memory_profile())
            profiled = [f"a memory profile for pprof is in {place!r}"]
        first = str(error).splitlines()[0]
        advised = "; ".join([*profiled, *advice(run)])
        raise OutOfMemoryError(f"a device has no memory left ({first}); {advised}") from error


def advice(run: Run) -> list[str]:
    """Suggests changes that reduce the memory of a run, the most effective first.

    Args:
        run: the run.

    Returns:
        Clauses that name config keys.
    """
    config = run.config
    mesh = run.world.mesh
    clauses = list(_plan_advice(run))
    claims = run.step.claims
    share = claims.params.bytes_per_device + claims.opt_state.bytes_per_device
    total = claims.params.bytes + claims.opt_state.bytes
    if share * 2 > total and mesh.size > 1:
        clauses.append(
            f"a device has {byte_size(share)} of {byte_size(total)} of the train state: shard it "
            "with parallel=fsdp"
        )
    rows = config.train.global_batch // run.step.batch_layout.divisor
    if rows > 1:
        more = config.train.accumulate * next(k for k in range(2, rows + 1) if rows % k == 0)
        clauses.append(f"use smaller microbatches with train.accumulate={more}")
    if config.remat in (None, AUTO) and run.step.strategy.remat is None:
        clauses.append("recompute blocks in the backward pass with 'remat={interval: 1}'")
    return clauses or ["use more devices, or a smaller train.global_batch"]


def _plan_advice(run: Run) -> Iterator[str]:
    """Suggests the plan that the planner would choose for this model, batch and machine."""
    plans = plan_here(run.config, run.world)
    if plans is None:
        return
    best = plans.best
    chip = plans.hardware
    if plans.fits:
        yield (
            f"axon plan suggests {best.candidate.name} on mesh {best.candidate.mesh}, "
            f"{byte_size(best.reading.peak)} of {byte_size(best.device_bytes)} on a {chip.name}"
        )
    else:
        yield f"according to axon plan, no strategy fits {run.world.size} x {chip.name}"
