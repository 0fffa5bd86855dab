"""Measured here: what makes the step of a config fastest, and whether its data keep up with it."""

from __future__ import annotations

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
from axon_dist.core.errors import ConfigError
from axon_dist.core.typing import JsonDict, OptionValue, PyTree
from axon_dist.data import Loader, LocalBatch
from axon_dist.inspect import memory
from axon_dist.mesh.chips import DOUBLE_BUFFERED, IN_PARALLEL
from axon_dist.nn import ActivationCheckpointing
from axon_dist.step import TrainStep

from ..config import CONFIG, RunConfig, abstract_batch
from .runs import build_loader, build_run
from .steps import build_step, build_world

Options = Mapping[str, OptionValue | None]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run the step of a config; all of them compute the same.

    Args:
        name: what the table calls it.
        options: for the compiler, beside and over those of the chip.
        bare: without the options of the chip.
        remat: what the backward pass recomputes; the config's own where `as_config`.
        as_config: whether `remat` is left to the config.
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
"""What is tried on each kind of device."""

REMATS: MappingProxyType[str, ActivationCheckpointing | None] = MappingProxyType(
    {
        "recompute nothing": None,
        "recompute blocks": ActivationCheckpointing(),
        "recompute all but products": ActivationCheckpointing(policy="dots_no_batch"),
    }
)
"""What the backward pass is tried to recompute."""


def variants(backend: str) -> tuple[Variant, ...]:
    """What `tune` tries on a kind of device.

    Args:
        backend: `"cpu"`, `"gpu"` or `"tpu"`.

    Returns:
        The config as it is first.

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
    """What one variant took.

    Args:
        name: of the variant.
        seconds: the median of a step; None where it did not run.
        spread: the fastest and the slowest round, seconds of a step.
        peak_bytes: of device memory, as the compiler counts them.
        compile_seconds: to compile the step.
        failure: the error where it did not run, else "".
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
        rows: sorted by the seconds of a step; what did not run last.
        device: the kind of device.
        items_per_step: how many items, such as tokens, a step takes.
        item: what they are.
    """

    rows: tuple[Timed, ...]
    device: str
    items_per_step: int
    item: str

    def to_dict(self) -> JsonDict:
        """The figures as plain values."""
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

    All are compiled first. Then they run in turn, round by round, so that other load of the machine
    slows all of them; they share one state, as they compute the same.

    Args:
        config: a run as YAML describes it, checked; its data are not read.
        rounds: how often each variant is timed.
        calls: steps of each timing.
        tried: the variants; None takes those of the kind of device.

    Returns:
        The times. A variant that does not compile or run is a row that says why.

    Raises:
        ConfigError: for fewer than one round or call, or where nothing runs.
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
        except Exception as error:  # Whatever a compiler says about an option is its row.
            rows[variant.name] = Timed(variant.name, None, failure=_first_line(error))
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
        config = dataclasses.replace(config, remat=variant.remat)
    options: dict[str, OptionValue | None] = dict(variant.options)
    if variant.bare:
        names = build_step(config, world).compiler_options
        options = dict.fromkeys(name for name in names if name not in config.compiler_options)
    step = build_step(config, world, compiler_options=options)
    begun = time.perf_counter()
    compiled = step.lower(batch).compile()
    return step, compiled, time.perf_counter() - begun


def _alternate(
    steps: dict[str, Any], rows: dict[str, Timed], rounds: int, calls: int
) -> dict[str, list[float]]:
    """The seconds of a step in each round, of every variant that runs."""
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
            except jax.errors.JaxRuntimeError as error:  # Such as memory that does not suffice.
                rows[name] = dataclasses.replace(rows[name], failure=_first_line(error))
                del times[name]
                state = None
                continue
            times[name] += [seconds] if number else []  # the first round compiles and warms up
    return times


def drawn_batch(config: RunConfig) -> dict[str, np.ndarray]:
    """A global batch of a config's shapes; its data are not read."""
    return {name: _drawn(shape, config) for name, shape in abstract_batch(config).items()}


def _drawn(shape: Any, config: RunConfig) -> np.ndarray:
    """Numbers of the kind of a batch; what they are changes no time."""
    random = np.random.default_rng(config.seed)
    if np.issubdtype(shape.dtype, np.integer):
        return random.integers(0, 2, shape.shape).astype(shape.dtype)
    return random.normal(size=shape.shape).astype(shape.dtype)


def _first_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


TIMED_STEPS = 3
"""Steps that are timed, after one that compiles."""
_BATCHES = 2
"""Batches that are loaded before the clock runs, and the fewest that it runs for."""


@dataclasses.dataclass(frozen=True)
class DataCheck:
    """What `check_data` measures.

    Args:
        description: the data in one sentence.
        samples: some samples of training as text.
        item: what a sample is counted in, such as tokens.
        samples_per_second: what one thread of each process loads, over all processes.
        needed_per_second: what the step takes on these devices; None where it was not run.
        padding: the share of the tokens of training that are padding; None where there are none.
        learned: the share of the tokens of the samples loaded that are targets; None where there
            are no tokens.
    """

    description: str
    samples: tuple[str, ...]
    item: str
    samples_per_second: float
    needed_per_second: float | None
    padding: float | None
    learned: float | None

    @property
    def keeps_up(self) -> bool | None:
        """Whether the data come faster than the step takes them."""
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
    """Loads some batches of a config's data, and takes some steps to see what they need.

    The speed is that of one thread, or of `data.num_workers` processes, which a run with
    `data.num_ahead` above 0 keeps busy beside the steps; of the steps it is that on the devices at
    hand.

    Args:
        config: a run as YAML describes it, checked.
        num_samples: how many samples to show.
        seconds: for how long to load batches.
        with_step: whether to compile and time the step.

    Returns:
        The figures.

    Raises:
        ConfigError: when the data is missing, damaged, too little, or not what the model can take.

    Example:
        >>> config = RunConfig.from_dict(
        ...     {"devices": {"emulate": 8}, "data": {"max_bytes": 9999}, "model": {"num_layers": 1}}
        ... )
        >>> check = check_data(config, num_samples=1, seconds=0.1, with_step=False)
        >>> check.item, check.padding, check.samples_per_second > 0
        ('tokens', 0.0, True)
    """
    run = build_run(config)
    # A loader that loads ahead would hand out at once what it had while no clock ran.
    alone = dataclasses.replace(config, data=dataclasses.replace(config.data, num_ahead=0))
    loader = build_loader(alone, run.world, run.step.strategy.batch_axes)
    batches = list(itertools.islice(loader, _BATCHES))
    speed, learned = _load_for(loader, seconds)
    return DataCheck(
        description=loader.description,
        samples=tuple(itertools.islice(_shown(batches, loader.samples), num_samples)),
        item=run.item,
        samples_per_second=speed,
        needed_per_second=_time_steps(run.step, batches[0], config) if with_step else None,
        padding=getattr(loader.samples, "padding", None),
        learned=learned,
    )


def _load_for(loader: Loader, seconds: float) -> tuple[float, float | None]:
    """Samples per second, and the share of tokens that are targets."""
    start, count, shares = time.perf_counter(), 0, []
    while count < _BATCHES or time.perf_counter() - start < seconds:
        batch = next(loader)
        count += 1
        if "tokens" in batch:
            shares.append(_targets(batch).mean())
    elapsed = time.perf_counter() - start
    return count * loader.global_batch / elapsed, float(np.mean(shares)) if shares else None


def _targets(batch: LocalBatch) -> np.ndarray:
    """Which tokens are targets, `[B, T]`; as `next_token_loss` counts them."""
    counts = np.ones(batch["tokens"][:, 1:].shape, bool)
    if "segments" in batch:
        segments = batch["segments"]
        counts &= (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    return counts & (batch["mask"][:, 1:] != 0) if "mask" in batch else counts


def _time_steps(step: TrainStep, batch: LocalBatch, config: RunConfig) -> float:
    """Samples per second that a compiled step takes."""
    state, metrics = step(step.init(), batch)
    jax.block_until_ready(metrics)
    start = time.perf_counter()
    for _ in range(TIMED_STEPS):
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
    return config.train.global_batch * TIMED_STEPS / (time.perf_counter() - start)


def _shown(batches: list[LocalBatch], samples: Any) -> Iterator[str]:
    """Samples as text, one by one."""
    for batch in batches:
        for row in range(len(next(iter(batch.values())))):
            sample = {name: array[row] for name, array in batch.items()}
            yield _text_of(sample, samples.show) if "tokens" in sample else _numbers_of(sample)


def _text_of(sample: dict[str, np.ndarray], show: Callable[..., str]) -> str:
    """The documents of a row, a line each; tokens that are no targets in brackets."""
    tokens = sample["tokens"]
    segments = sample.get("segments", np.ones_like(tokens))
    mask = sample.get("mask", np.ones_like(tokens))
    lines = []
    for number in np.unique(segments[segments > 0]).tolist():
        here = segments == number
        ids, learned = tokens[here], mask[here] != 0
        turns = np.split(np.arange(len(ids)), 1 + np.flatnonzero(np.diff(learned)))
        shown = [show(ids[turn]) if learned[turn[0]] else f"[{show(ids[turn])}]" for turn in turns]
        lines.append(" ".join(shown))
    if padding := int((segments == 0).sum()):
        lines.append(f"({padding} of {len(tokens)} tokens are padding)")
    return "\n".join(lines)


def _numbers_of(sample: dict[str, np.ndarray]) -> str:
    return ", ".join(
        f"{name}={array.item()}" if array.ndim == 0 else f"{name} {array.dtype}{list(array.shape)}"
        for name, array in sample.items()
    )
