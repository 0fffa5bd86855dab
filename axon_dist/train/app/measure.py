"""Measures on this machine: the fastest variant of a step, and whether data loading keeps up."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from rich.table import Table

from axon_dist.core.checks import COUNT, NUMBER, ArgumentKind, checked
from axon_dist.core.errors import AxonDistError, ConfigError
from axon_dist.core.typing import JsonDict, OptionValue, PyTree
from axon_dist.data import Loader, LocalBatch
from axon_dist.inspect import memory
from axon_dist.mesh.chips import DOUBLE_BUFFERED, IN_PARALLEL
from axon_dist.nn import ActivationCheckpointing
from axon_dist.step import TrainStep

from ..config import CONFIG, RunConfig, abstract_batch, without_option
from .runs import build_loader, build_run
from .steps import build_step, build_world

Options = Mapping[str, OptionValue | None]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run the step of a config; all variants compute the same function.

    Args:
        name: its name in the table.
        options: compiler options that override those of the chip.
        bare: drop the options of the chip.
        remat: what the backward pass recomputes, in place of what config and strategies say; None
            for nothing. Ignored if `as_config`.
        as_config: recompute what config and strategies say.
    """

    name: str
    options: Options = dataclasses.field(default_factory=dict)
    bare: bool = False
    remat: ActivationCheckpointing | None = None
    as_config: bool = True


(_TWO,), (_IN_FLIGHT,) = DOUBLE_BUFFERED, IN_PARALLEL
OPTIONS: MappingProxyType[str, Mapping[str, Options]] = MappingProxyType(
    {
        "gpu": {
            "no latency hiding": {"xla_gpu_enable_latency_hiding_scheduler": False},
            "latency hiding": {"xla_gpu_enable_latency_hiding_scheduler": True},
            "two iterations at a time": {_TWO: True},
            "one iteration at a time": {_TWO: False},
            "one collective in flight": {_IN_FLIGHT: 1},
            "eight collectives in flight": {_IN_FLIGHT: 8},
            "sixteen collectives in flight": {_IN_FLIGHT: 16},
            "no triton products": {"xla_gpu_enable_triton_gemm": False},
            "exhaustive tiling": {"xla_gpu_exhaustive_tiling_search": True},
        },
        "tpu": {},
        "cpu": {"no fast minima": {"xla_cpu_enable_fast_min_max": False}},
    }
)
"""Compiler options to try on each kind of device."""

REMATS: MappingProxyType[str, ActivationCheckpointing | None] = MappingProxyType(
    {
        "recompute nothing": None,
        "recompute blocks": ActivationCheckpointing(),
        "recompute all but products": ActivationCheckpointing(policy="dots_no_batch"),
    }
)
"""Remat policies to try."""


def variants(backend: str) -> tuple[Variant, ...]:
    """Lists the variants that `tune` tries on a kind of device.

    Args:
        backend: `"cpu"`, `"gpu"` or `"tpu"`.

    Returns:
        The variants; the unchanged config comes first.

    Example:
        >>> [variant.name for variant in variants("cpu")][:2]
        ['as configured', "without the chip's options"]
    """
    options = [Variant(name, options=flags) for name, flags in OPTIONS.get(backend, {}).items()]
    remats = [Variant(name, remat=remat, as_config=False) for name, remat in REMATS.items()]
    bare = Variant("without the chip's options", bare=True)
    return (Variant("as configured"), bare, *options, *remats)


@dataclasses.dataclass(frozen=True)
class Timed:
    """The time and memory of one variant.

    Args:
        name: the name of the variant.
        seconds: the median seconds per step; None if it did not run.
        spread: the seconds per step of the fastest and the slowest round.
        peak_bytes: peak device memory, according to the compiler.
        compile_seconds: the time to compile the step.
        failure: the error if it did not run, else "".
    """

    name: str
    seconds: float | None
    spread: tuple[float, float] | None = None
    peak_bytes: int | None = None
    compile_seconds: float | None = None
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The variants of a step, fastest first; prints as a table.

    Args:
        rows: sorted by seconds per step; variants that did not run come last.
        device: the kind of device.
        items_per_step: the number of items, such as tokens, that a step processes.
        item: the kind of item.
    """

    rows: tuple[Timed, ...]
    device: str
    items_per_step: int
    item: str

    def to_dict(self) -> JsonDict:
        """Returns the figures as plain values."""
        return dataclasses.asdict(self)

    def __rich__(self) -> Table:
        table = Table(title=f"steps side by side on {self.device}")
        for name in ("variant", "ms a step", "fastest–slowest", f"{self.item}/s", "peak GiB"):
            table.add_column(name, justify="left" if name == "variant" else "right")
        for row in self.rows:
            if row.seconds is None or row.spread is None or row.peak_bytes is None:
                table.add_row(row.name, "-", row.failure)
                continue
            low, high = (1e3 * each for each in row.spread)
            rate = self.items_per_step / row.seconds
            cells = f"{1e3 * row.seconds:.2f}", f"{low:.2f}–{high:.2f}", f"{rate:,.0f}"
            table.add_row(row.name, *cells, f"{row.peak_bytes / 2**30:.2f}")
        return table


@checked(config=CONFIG, rounds=COUNT, calls=COUNT)
def tune(
    config: RunConfig, rounds: int = 5, calls: int = 4, tried: Sequence[Variant] | None = None
) -> Tuning:
    """Measures the step of a config under several compiler options and remat policies.

    All variants are compiled first. Then they run in turn, round by round, so that other load on
    the machine slows all of them equally. They share one state, because they compute the same
    function.

    Args:
        config: a checked run, as YAML describes it; its data are not read.
        rounds: the number of timings of each variant.
        calls: steps per timing.
        tried: the variants; None for those of this kind of device.

    Returns:
        The times. The row of a variant that does not compile or run has the error.

    Raises:
        ConfigError: for fewer than one round or call, or when no variant runs.
    """
    world = build_world(config)
    device = world.mesh.devices.flat[0]
    tried = variants(device.platform) if tried is None else tried
    rows: dict[str, Timed] = {}
    steps: dict[str, Any] = {}
    batch = drawn_batch(config)
    for variant in tried:
        try:
            step, compiled, seconds = _compiled(config, world, variant, batch)
        except Exception as error:  # Compilers raise all kinds of errors; the row reports it.
            rows[variant.name] = Timed(variant.name, None, failure=_message_of(error))
            continue
        steps[variant.name] = step, compiled, step.place(batch)
        peak = memory(compiled).peak
        rows[variant.name] = Timed(variant.name, None, None, peak, seconds)
    times = _alternate(steps, rows, rounds, calls)
    for name, samples in times.items():
        median = statistics.median(samples)
        spread = min(samples), max(samples)
        rows[name] = dataclasses.replace(rows[name], seconds=median, spread=spread)
    if not times:
        errors = "; ".join(f"{row.name}: {row.failure}" for row in rows.values())
        raise ConfigError(f"no variant of the step runs here ({errors}); use a smaller batch")
    order = sorted(rows.values(), key=lambda row: (row.seconds is None, row.seconds or 0.0))
    per_sample = config.kind.task.items_per_sample(config.data)
    items = config.train.global_batch * per_sample
    return Tuning(tuple(order), device.device_kind, items, config.kind.task.item)


def _compiled(
    config: RunConfig, world: Any, variant: Variant, batch: PyTree
) -> tuple[Any, Any, float]:
    if not variant.as_config:
        config = recomputing(config, variant.remat)
    options: dict[str, OptionValue | None] = dict(variant.options)
    if variant.bare:
        names = build_step(config, world).compiler_options
        options = dict.fromkeys(name for name in names if name not in config.compiler_options)
    step = build_step(config, world, compiler_options=options)
    begun = time.perf_counter()
    if not variant.as_config and step.strategy.remat != variant.remat:
        # Otherwise the row would show the times of another program.
        what = "compare by that strategy's own options"
        if step.strategy.pipeline is not None:
            what = (
                "the stages of a pipeline have only the option backward, which takes the policy "
                "but neither interval nor classes; leave these out of the variant"
            )
        raise ConfigError(
            f"the strategy {step.strategy.name} recomputes {step.strategy.remat} in place of "
            f"{variant.remat}; {what}"
        )
    compiled = step.lower(batch).compile()
    return step, compiled, time.perf_counter() - begun


def recomputing(config: RunConfig, remat: ActivationCheckpointing | None) -> RunConfig:
    """Returns the config with a remat policy in place of what its strategies say about it.

    Args:
        config: the config.
        remat: what the backward pass recomputes; None for nothing.

    Example:
        >>> own = {"fsdp": {"activation_checkpointing": {}}}
        >>> dict(recomputing(RunConfig.from_dict({"parallel": own}), None).parallel)
        {'fsdp': {}}
    """
    parallel = without_option(config.parallel, "activation_checkpointing")
    if "pipeline" in parallel:
        # Only the option of the pipeline decides what its stages keep.
        kept = "residuals" if remat is None else remat.policy
        parallel["pipeline"] = {**parallel["pipeline"], "backward": kept}
        remat = None
    return dataclasses.replace(config, parallel=MappingProxyType(parallel), remat=remat)


def _alternate(
    steps: dict[str, Any], rows: dict[str, Timed], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Returns the seconds per step in each round, for every variant that runs."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    state: object = None
    for number in range(rounds + 1):
        names = list(times) if number % 2 == 0 else list(reversed(times))
        for name in names:
            step, _, placed = steps[name]
            try:
                state = step.init() if state is None else state
                begun = time.perf_counter()
                for _ in range(1 if number == 0 else calls):
                    state, _ = step(state, placed)
                jax.block_until_ready(state)
                seconds = (time.perf_counter() - begun) / calls
            except jax.errors.JaxRuntimeError as error:  # Such as out of memory.
                rows[name] = dataclasses.replace(rows[name], failure=_message_of(error))
                del times[name]
                state = None
                continue
            if number:  # the first round only warms up
                times[name].append(seconds)
    return times


def drawn_batch(config: RunConfig) -> dict[str, np.ndarray]:
    """Draws a random global batch with the shapes of a config; its data are not read."""
    return {name: _drawn(shape, config) for name, shape in abstract_batch(config).items()}


def _drawn(shape: Any, config: RunConfig) -> np.ndarray:
    """Draws random numbers of a batch's shape and dtype; their values do not affect the time."""
    random = np.random.default_rng(config.seed)
    if np.issubdtype(shape.dtype, np.integer):
        return random.integers(0, 2, shape.shape).astype(shape.dtype)
    return random.normal(size=shape.shape).astype(shape.dtype)


def _message_of(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    # Our own messages end with what to do; those of compilers may have pages.
    return text if isinstance(error, AxonDistError) else text[:160]


TIMED_STEPS = 3
"""The number of timed steps, after one step that compiles."""
_BATCHES = 2
"""The number of batches loaded before timing, and the minimum number of timed batches."""
_LENGTH_BATCHES = 32
"""The number of batches that show how often each length of `data.buckets` occurs."""


@dataclasses.dataclass(frozen=True)
class DataCheck:
    """The measurements of `check_data`.

    Args:
        description: a one-sentence description of the data.
        samples: some training samples as text.
        item: the unit of throughput, such as tokens.
        samples_per_second: the loading speed of all processes, each with one thread or with
            `data.num_workers` processes of its own.
        num_workers: `data.num_workers`; 0 for one thread.
        needed_per_second: the speed of the step on these devices; None if it was not run.
        padding: the fraction of training tokens that are padding; None if there are no tokens.
        learned: the fraction of the loaded tokens that are targets; None if there are no tokens.
    """

    description: str
    samples: tuple[str, ...]
    item: str
    samples_per_second: float
    num_workers: int
    needed_per_second: float | None
    padding: float | None
    learned: float | None

    @property
    def keeps_up(self) -> bool | None:
        """Whether data are loaded faster than the step consumes them."""
        if self.needed_per_second is None:
            return None
        return self.samples_per_second > self.needed_per_second


@checked(
    config=CONFIG,
    num_samples=COUNT,
    seconds=ArgumentKind("above 0 and at most 3600", lambda x: NUMBER.holds(x) and 0 < x <= 3600),
)
def check_data(
    config: RunConfig, num_samples: int = 3, seconds: float = 2.0, with_step: bool = True
) -> DataCheck:
    """Measures the loading speed of a config's data, and the speed of its step.

    The loading speed is that of one thread, or of `data.num_workers` processes; a run with
    `data.num_ahead` above 0 loads at this speed while steps run. The speed of the step is measured
    on the present devices.

    Args:
        config: a checked run, as YAML describes it.
        num_samples: the number of samples to show.
        seconds: the time to load batches for.
        with_step: whether to compile and time the step.

    Returns:
        The measurements.

    Raises:
        ConfigError: when the data is missing, damaged, too small, or unsuitable for the model.

    Example:
        >>> config = RunConfig.from_dict(
        ...     {"devices": {"emulate": 8}, "data": {"max_bytes": 9999}, "model": {"num_layers": 1}}
        ... )
        >>> check = check_data(config, num_samples=1, seconds=0.1, with_step=False)
        >>> check.item, check.padding, check.samples_per_second > 0
        ('tokens', 0.0, True)
    """
    run = build_run(config)
    # A loader that prefetches would return batches that it loaded before timing began.
    no_prefetch = dataclasses.replace(config, data=dataclasses.replace(config.data, num_ahead=0))
    loader = build_loader(no_prefetch, run.world, run.step.strategy.batch_axes)
    batches = list(itertools.islice(loader, _BATCHES))
    start = loader.state()
    speed, learned = _load_for(loader, seconds)
    # Each process loads as many batches as its clock allows, but the batches of a step must be
    # those of one position on every process: their lengths differ.
    loader.restore(start)
    return DataCheck(
        description=loader.description,
        samples=tuple(itertools.islice(_shown(batches, loader.samples), num_samples)),
        item=run.item,
        samples_per_second=speed,
        num_workers=config.data.num_workers,
        needed_per_second=_time_steps(run.step, loader, config) if with_step else None,
        padding=getattr(loader.samples, "padding", None),
        learned=learned,
    )


def _load_for(loader: Loader, seconds: float) -> tuple[float, float | None]:
    """Returns samples per second, and the fraction of tokens that are targets."""
    start = time.perf_counter()
    count = 0
    shares = []
    while count < _BATCHES or time.perf_counter() - start < seconds:
        batch = next(loader)
        count += 1
        if "tokens" in batch:
            shares.append(_targets(batch).mean())
    elapsed = time.perf_counter() - start
    return count * loader.global_batch / elapsed, float(np.mean(shares)) if shares else None


def _targets(batch: LocalBatch) -> np.ndarray:
    """Returns a mask of the tokens that are targets, `[B, T]`, as in `next_token_loss`."""
    counts = np.ones(batch["tokens"][:, 1:].shape, bool)
    if "segments" in batch:
        segments = batch["segments"]
        counts &= (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    return counts & (batch["mask"][:, 1:] != 0) if "mask" in batch else counts


def _time_steps(step: TrainStep, loader: Loader, config: RunConfig) -> float:
    """Returns the samples per second of a compiled step, over batches of every length."""
    has_lengths = getattr(loader.samples, "buckets", None) is not None
    batches = [*itertools.islice(loader, _LENGTH_BATCHES if has_lengths else 1)]
    lengths = collections.Counter(_shapes(batch) for batch in batches)
    seconds = 0.0
    state = step.init()
    for shapes, count in lengths.items():
        batch = next(batch for batch in batches if _shapes(batch) == shapes)
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        start = time.perf_counter()
        for _ in range(TIMED_STEPS):
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
        seconds += count / len(batches) * (time.perf_counter() - start) / TIMED_STEPS
    return config.train.global_batch / seconds


def _shapes(batch: LocalBatch) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, np.shape(array)) for name, array in batch.items())


def _shown(batches: list[LocalBatch], samples: Any) -> Iterator[str]:
    """Yields samples as text."""
    for batch in batches:
        for row in range(len(next(iter(batch.values())))):
            sample = {name: array[row] for name, array in batch.items()}
            yield _text_of(sample, samples.show) if "tokens" in sample else _numbers_of(sample)


def _text_of(sample: dict[str, np.ndarray], show: Callable[..., str]) -> str:
    """Formats a row, one line per document; tokens that are not targets are in brackets."""
    tokens = sample["tokens"]
    segments = sample.get("segments", np.ones_like(tokens))
    mask = sample.get("mask", np.ones_like(tokens))
    lines = []
    for number in np.unique(segments[segments > 0]).tolist():
        in_document = segments == number
        ids = tokens[in_document]
        is_target = mask[in_document] != 0
        runs = np.split(np.arange(len(ids)), 1 + np.flatnonzero(np.diff(is_target)))
        shown = [show(ids[run]) if is_target[run[0]] else f"[{show(ids[run])}]" for run in runs]
        lines.append(" ".join(shown))
    if padding := int((segments == 0).sum()):
        lines.append(f"({padding} of {len(tokens)} tokens are padding)")
    return "\n".join(lines)


def _numbers_of(sample: dict[str, np.ndarray]) -> str:
    return ", ".join(
        f"{name}={array.item()}" if array.ndim == 0 else f"{name} {array.dtype}{list(array.shape)}"
        for name, array in sample.items()
    )
