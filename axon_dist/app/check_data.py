"""The data of a config before a run: what samples look like, how fast they come, and how full."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from ..config.parse import CONFIG
from ..config.schema import RunConfig
from ..core.errors import ConfigError
from ..core.told import told
from ..data import Loader, LocalBatch
from ..step import TrainStep
from .runs import build_loader, build_run

TIMED_STEPS = 3
"""Steps that are timed, after one that compiles."""
_MOST_SECONDS = 3600
_BATCHES = 2
"""Batches that are loaded before the clock runs, and the fewest that it runs for."""


@dataclasses.dataclass(frozen=True)
class DataCheck:
    """What `check_data` finds.

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


@told(config=CONFIG)
def check_data(
    config: RunConfig, num_samples: int = 3, seconds: float = 2.0, with_step: bool = True
) -> DataCheck:
    """Loads some batches of a config's data, and takes some steps to see what they need.

    The speed is that of one thread, which a run with `data.num_ahead` above 0 keeps busy beside
    the steps; of the steps it is that on the devices at hand.

    Args:
        config: a run as YAML describes it, checked.
        num_samples: how many samples to show.
        seconds: for how long to load batches.
        with_step: whether to compile and time the step.

    Returns:
        What was found.

    Raises:
        ConfigError: when the data is missing, damaged, too little, or not what the model can take.

    Example:
        >>> config = RunConfig.from_dict(
        ...     {"devices": {"emulate": 8}, "data": {"max_bytes": 10**5, "sequence_length": 16}}
        ... )
        >>> found = check_data(config, num_samples=1, seconds=0.1, with_step=False)
        >>> found.item, found.padding, found.samples_per_second > 0
        ('tokens', 0.0, True)
    """
    if num_samples < 1 or not 0 < seconds <= _MOST_SECONDS:
        raise ConfigError(
            f"check_data got num_samples={num_samples} and seconds={seconds}; show at least 1 "
            f"sample, and load for longer than 0 seconds and at most {_MOST_SECONDS}"
        )
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
            yield _text(sample, samples.show) if "tokens" in sample else _numbers(sample)


def _text(sample: dict[str, np.ndarray], show: Callable[..., str]) -> str:
    """The documents of a row, a line each; what is no target stands in brackets."""
    tokens = sample["tokens"]
    segments = sample.get("segments", np.ones_like(tokens))
    mask = sample.get("mask", np.ones_like(tokens))
    lines = []
    for number in np.unique(segments[segments > 0]).tolist():
        here = segments == number
        own, learned = tokens[here], mask[here] != 0
        turns = np.split(np.arange(len(own)), 1 + np.flatnonzero(np.diff(learned)))
        shown = [show(own[turn]) if learned[turn[0]] else f"[{show(own[turn])}]" for turn in turns]
        lines.append(" ".join(shown))
    if padding := int((segments == 0).sum()):
        lines.append(f"({padding} of {len(tokens)} tokens are padding)")
    return "\n".join(lines)


def _numbers(sample: dict[str, np.ndarray]) -> str:
    return ", ".join(
        f"{name}={array.item()}" if array.ndim == 0 else f"{name} {array.dtype}{list(array.shape)}"
        for name, array in sample.items()
    )
