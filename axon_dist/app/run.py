"""`train`: a whole run, from a config to a folder with its results; `dry_run`: what it would do."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import yaml
from rich.console import Console

from axon_dist.checkpoint import CheckpointManager, on_main
from axon_dist.core.errors import AxonDistError, CheckpointError, ConfigError, NonfiniteError
from axon_dist.core.told import told
from axon_dist.core.tree import num_bytes
from axon_dist.core.words import byte_size, plural, si
from axon_dist.launch import ELASTIC
from axon_dist.loop import (
    FINISHED,
    JsonlWriter,
    MetricWriter,
    MlflowWriter,
    Progress,
    TensorBoardWriter,
    TrackioWriter,
    Trainer,
    TrainResult,
    WandbWriter,
    bytes_per_device,
    has_module,
    make_progress,
    plot_losses,
)
from axon_dist.mesh import World, build_mesh
from axon_dist.step import PortableForm, TrainState
from axon_dist.weights import load_weights
from axon_dist.weights.load import check_weights

from ..config import CONFIG, RunConfig
from ..config.sections import Logger, Mlflow, TensorBoard, Trackio, Wandb, Weights
from .build import Run, abstract_batch, build_run, step_for
from .directory import RunDirectory, check_directory, create_directory, take_folders
from .examine import read_program
from .out_of_memory import explained
from .report import opening_lines, summarize, summary_table
from .resume import (
    check_copies,
    check_resume,
    find_start,
    newest_state,
    open_checkpoints,
    open_copies,
    save_state,
)


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What `train` returns.

    Args:
        result: what the loop came to, with the last state.
        directory: where everything else lies.
        summary: what `summary.json` holds.
    """

    result: TrainResult
    directory: RunDirectory
    summary: dict[str, Any]


@told(config=CONFIG)
def train(
    config: RunConfig, console: Console | None = None, resume: str | None = None
) -> RunResult:
    """Trains what a config describes, and keeps what comes of it.

    Process 0 writes the folder: `config.yaml`, `metrics.jsonl`, `program.json`, which says what the
    compiled step is made of, `summary.json`, and `loss.png` where matplotlib is installed; every
    process its part of `checkpoints/`. All of it is there too when Ctrl-C ended the run. A run that
    was stopped anywhere and goes on ends with the bits of one that was not.

    Args:
        config: a run as YAML describes it, checked.
        console: where process 0 tells how it goes; None tells nothing.
        resume: where to go on, `"auto"` or a path; see `find_start`.

    Returns:
        The result.

    Raises:
        AxonDistError: before anything is compiled, for whatever the config cannot mean.
        OutOfMemoryError: when a device has no memory left, with what to change.
        NonfiniteError: when a loss or gradient is not finite and `train.nonfinite` says stop.
        CheckpointError: when there is nothing good to resume, or, after everything else is
            written, when the last state could not be saved.
    """
    start = time.perf_counter()
    check_copies(config, os.environ, resume)
    run = _with_weights(build_run(config), resume)
    on_main(lambda: check_resume(resume))
    is_main = _is_main(run)
    console = console if console is not None and is_main else Console(quiet=True)
    tell = functools.partial(_print_line, console)
    directory = RunDirectory(Path(on_main(lambda: str(create_directory(config, resume).path))))
    for line in [*opening_lines(run), f"run directory: {directory.path}"]:
        tell(line)
    with contextlib.ExitStack() as stack:
        on_main(lambda: take_folders(config, directory, stack, tell))
        form = PortableForm(run.step)
        copies = open_copies(run, form, os.environ, tell)
        state = find_start(run, form, directory, resume, tell, copies)
        if state is not None and int(state.step) >= config.train.steps:
            tell(f"finished already: {int(state.step)} of {config.train.steps} steps are done")
            return _finished_already(run, directory, state)
        history = _go_on(config, directory, state, tell) if is_main else []
        state = _with_first_weights(run, state, tell)
        progress = make_progress(console, config.name)
        with contextlib.ExitStack() as inner:
            writers = _open_writers(config, directory, inner) if is_main else []
            checkpoints = inner.enter_context(open_checkpoints(run, directory, progress.note))
            save = functools.partial(save_state, run, form, checkpoints)
            go_back = functools.partial(newest_state, form, checkpoints, copies)
            ahead = inner.enter_context(compiling_ahead(run, os.environ, progress.note))
            keep = (
                functools.partial(_keep_program, run, directory, progress, ahead)
                if is_main
                else _nothing
            )
            trainer = run.trainer(
                progress,
                writers,
                save,
                go_back,
                history,
                keep,
                str(directory.profile),
                None if copies is None else copies.save,
            )
            with explained(run, directory.path):
                result = _fit(trainer, state, checkpoints)
        summary = summarize(run, result)
        if is_main:
            directory.write_summary(summary)
            _plot(run, result, directory)
        # All wait for that: a scheduler may end the other processes as soon as one has ended.
        on_main(lambda: None)
        _print_closing(console, summary, directory, time.perf_counter() - start)
        if checkpoints.failure is not None:
            raise CheckpointError(f"the last state is not saved: {checkpoints.failure}")
        _check_kept(config, directory, writers)
    return RunResult(result, directory, summary)


def _with_first_weights(
    run: Run, state: TrainState | None, tell: Callable[[str], None]
) -> TrainState | None:
    """The state to start from: that of a checkpoint, or with the weights of files, if given."""
    weights = run.config.weights
    if state is not None or weights is None:
        return state
    tell(f"weights: from {', '.join(weights.files)}")
    return load_weights(run.step, **_options(weights))


def _with_weights(run: Run, resume: str | None) -> Run:
    """A run, if the files of its first weights fit it; one that goes on may no longer have them."""
    if resume is None and run.config.weights is not None:
        check_weights(run.step, **_options(run.config.weights))
    return run


_ADAPTER = r"(?:.*/)?lora/lora_[ab]"
"""The paths of what `lora` adds to a model, which files of weights need not have."""


def _options(weights: Weights) -> dict[str, Any]:
    """What a config says to `load_weights`."""
    files = weights.files[0] if len(weights.files) == 1 else list(weights.files)
    keep = (*weights.keep, _ADAPTER)
    return {
        "files": files,
        "rules": weights.format,
        "cast": weights.cast,
        "keep": keep,
        "differ": weights.differ,
    }


def _go_on(
    config: RunConfig, directory: RunDirectory, state: TrainState | None, tell: Callable
) -> list[dict[str, Any]]:
    """Writes the config of a run that may go on, tells what it changes, and reads the metrics."""
    for change in directory.changes(config):
        tell(f"config: {change}")
    directory.write_config(config)
    return directory.take_metrics(0 if state is None else int(state.step), tell)


def _check_kept(
    config: RunConfig, directory: RunDirectory, writers: Sequence[MetricWriter]
) -> None:
    """Raises `ConfigError` if what a run had written was taken away while it ran."""
    if any(isinstance(writer, JsonlWriter) and writer.was_removed for writer in writers):
        directory.write_config(config)
        raise ConfigError(
            f"{str(directory.path)!r} was removed or emptied while the run was writing to it; what "
            "it wrote before that is gone, what it wrote after is there"
        )


def _nothing() -> None:
    """What other processes do where process 0 writes."""


def _keep_program(
    run: Run, directory: RunDirectory, progress: Progress, then: Callable[[], None]
) -> None:
    """Writes what the compiled step is made of; a run goes on without that."""
    with progress.phase("reading the compiled step"):
        try:
            program = read_program(run)
            directory.write_program(program)
            for warning in program["warnings"]:
                progress.note(warning)
        except Exception as error:  # nothing here is worth the run
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            progress.note(f"{directory.program.name} is not written: {reason}")
    then()


def _fit(trainer: Trainer, state: TrainState | None, checkpoints: CheckpointManager) -> TrainResult:
    try:
        return trainer.fit(state)
    except NonfiniteError:
        # Every process stops at the same step, so that they can finish their last save together.
        checkpoints.wait()
        raise


def _finished_already(run: Run, directory: RunDirectory, state: TrainState) -> RunResult:
    """The result of a run that has no step left; its summary is written if it was cut off."""
    result = TrainResult(
        state=state,
        num_steps=int(state.step),
        reason=FINISHED,
        train_curve=(),
        validation_curve=(),
        compile_seconds=0.0,
        train_seconds=0.0,
        items_per_second=None,
        device_bytes=bytes_per_device(state),
    )
    summary = summarize(run, result)
    if _is_main(run):
        directory.write_missing(run.config, summary)
    return RunResult(result, directory, summary)


def _is_main(run: Run) -> bool:
    return run.world.process_index == 0


def _open_writers(
    config: RunConfig, directory: RunDirectory, stack: contextlib.ExitStack
) -> list[MetricWriter]:
    writers: list[MetricWriter] = [JsonlWriter(directory.metrics)]
    stack.callback(writers[0].close)
    for logger in config.loggers:
        writer = _writer(logger, directory.path, config)
        stack.callback(writer.close)
        writers.append(writer)
    return writers


def _writer(logger: Logger, folder: Path, config: RunConfig) -> MetricWriter:
    """Opens what writes to the place that a config names."""
    name, plain = config.name, config.to_dict()
    match logger:
        case TensorBoard():
            return TensorBoardWriter(folder / "tensorboard")
        case Wandb(project=project, mode=mode):
            return WandbWriter(folder, project=project, name=name, mode=mode, config=plain)
        case Trackio(project=project):
            return TrackioWriter(project=project, name=name, config=plain)
        case Mlflow(experiment=experiment, uri=uri):
            uri = uri or f"sqlite:///{(folder / 'mlflow.db').resolve()}"
            return MlflowWriter(uri, experiment=experiment, name=name, config=plain)
    raise TypeError(f"no writer for the logger {logger}; add one here")


def _plot(run: Run, result: TrainResult, directory: RunDirectory) -> None:
    if has_module("matplotlib"):
        title = f"{run.config.name}: {run.step.strategy.name} on {run.world.spec}"
        losses = result.train_curve, result.validation_curve
        plot_losses(directory.plot, *losses, run.unit, title, result.metric_curves)


def _print_line(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, highlight=False, markup=False)


def _print_closing(
    console: Console, summary: dict[str, object], directory: RunDirectory, seconds: float
) -> None:
    console.print(summary_table(summary, seconds))
    plot = directory.plot if directory.plot.exists() else "none (pip install 'axon_dist[plots]')"
    _print_line(console, f"run directory: {directory.path}")
    _print_line(console, f"loss curves: {plot}")


_CACHE = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")


@contextlib.contextmanager
def compiling_ahead(
    run: Run, env: Mapping[str, str], tell: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Lets process 0 compile the step of a run that has lost a process into the cache of JAX.

    Which process is lost does not matter: those that are left count from 0 again, so that they run
    the program of the first ones. JAX looks into the cache when they start.

    Args:
        run: of all processes.
        env: the environment, in which an elastic launcher says so; nothing is compiled elsewhere,
            nor without a cache that outlives the processes.
        tell: takes a sentence when fewer processes could not go on.

    Yields:
        Starts the compilation, once the step of the run is compiled; the context waits for it.
    """
    begun: list[threading.Thread] = []

    def begin() -> None:
        if _can_shrink(run, env):
            begun.append(threading.Thread(target=_compile, args=(run, tell), name="axon-ahead"))
            begun[0].start()

    try:
        yield begin
    finally:
        for thread in begun:
            thread.join()


def _can_shrink(run: Run, env: Mapping[str, str]) -> bool:
    """Whether a run on fewer processes would have another mesh, whose program can be kept."""
    shrinks = -1 in run.config.mesh.shape.values() and run.config.devices.emulate is None
    has_cache = all(getattr(jax.config, name) for name in _CACHE)
    return shrinks and has_cache and bool(env.get(ELASTIC)) and run.world.num_processes > 1


def _compile(run: Run, tell: Callable[[str], None]) -> None:
    fewer = run.world.num_processes - 1
    try:
        step, _ = step_for(run.config, world_of_first(run, fewer))
        step.lower(abstract_batch(run.config)).compile()
    except AxonDistError as error:
        tell(f"{fewer} processes could not go on if one were lost: {error}")


def world_of_first(run: Run, count: int) -> World:
    """The world that the first processes of a run would make up without the others.

    Args:
        run: of all processes.
        count: how many of them.
    """
    devices = [d for d in run.world.mesh.devices.flat if d.process_index < count]
    devices.sort(key=lambda device: device.id)
    return World(build_mesh(run.config.mesh.resolve(len(devices)), devices), run.world.backend)


@dataclasses.dataclass(frozen=True)
class DryRun:
    """What `dry_run` finds.

    Args:
        config: every value of the config, defaults spelled out.
        opening: what the run says of itself at its start.
        program: what `read_program` reads from its compiled step.
        items: what a sample is counted in, and how many the whole run takes.
        ranks: of each process the ranks and the rows of a global batch that it brings.
        files: what would be written, and how large it gets where that is known.
    """

    config: dict[str, Any]
    opening: tuple[str, ...]
    program: dict[str, Any]
    items: tuple[str, int]
    ranks: tuple[str, ...]
    files: tuple[str, ...]

    def lines(self) -> list[str]:
        """For a terminal."""
        memory = self.program["memory"]
        width = max(map(len, memory))
        item, count = self.items
        chip = self.program["chip"]
        fits = f" of {byte_size(self.program['chip_bytes'])} of {chip}" if chip else ""
        return [
            yaml.safe_dump(self.config, sort_keys=False).rstrip(),
            "---",
            *self.opening,
            f"{si(count)} {item} in all",
            *self.ranks,
            "memory per device, read from the compiled step:",
            *(f"  {label:<{width}}  {byte_size(size):>8}" for label, size in memory.items()),
            f"  {'in all':<{width}}  {byte_size(sum(memory.values())):>8}{fits}",
            *self.program["warnings"],
            "would write:",
            *(f"  {file}" for file in self.files),
            "dry run: nothing was trained and nothing was written",
        ]


@told(config=CONFIG)
def dry_run(config: RunConfig) -> DryRun:
    """Builds and compiles all that a run needs, and says what it would do; writes nothing.

    Args:
        config: a run as YAML describes it, checked.

    Returns:
        What was found.

    Raises:
        AxonDistError: whatever a run would be refused for before its first step.
    """
    check_directory(config)
    run = build_run(config)
    if config.weights is not None:
        check_weights(run.step, **_options(config.weights))
    train = config.train
    return DryRun(
        config=config.to_dict(),
        opening=tuple(opening_lines(run)),
        program=read_program(run),
        items=(run.item, train.steps * run.items_per_step),
        ranks=tuple(_shares(run)),
        files=tuple(_files(config, run.step.abstract_state)),
    )


def _shares(run: Any) -> list[str]:
    """How a global batch is divided."""
    axes, mesh = run.step.strategy.batch_axes, run.world.mesh
    rows, accumulate = run.config.train.global_batch, run.config.train.accumulate
    index, count = run.world.share_of_batch(axes)
    ranks = 1
    for axis in axes:
        ranks *= mesh.shape[axis]
    each = rows // ranks
    cut = f", in {plural(accumulate, 'microbatch')} of {each // accumulate}" * (accumulate > 1)
    return [
        f"each of {plural(ranks, 'batch rank')} ({', '.join(axes) or 'no axis'}) takes "
        f"{each} of {plural(rows, 'sample')} a step{cut}",
        f"this process brings share {index + 1} of {count}: {rows // count} samples a step",
    ]


def _files(config: RunConfig, state: object) -> list[str]:
    path = Path(config.run_dir or f"runs/{config.name}-<time>").expanduser()
    kept = config.checkpoint
    folder = Path(kept.dir).expanduser() if kept.dir else path / "checkpoints"
    size = num_bytes(state)
    when = f"every {kept.every} steps and at the end" if kept.every else "at the end"
    named = ("config.yaml", "metrics.jsonl", "program.json", "summary.json", "loss.png")
    return [
        *(os.fspath(path / name) for name in named),
        f"{folder}{os.sep}step_…: {when}, {byte_size(size)} each, of which "
        f"{plural(kept.keep + kept.best, 'stays', 'stay')}",
    ]
