"""Averages metrics, measures the time and hardware utilization of a step, and traces steps."""

from __future__ import annotations

import collections
import dataclasses
import functools
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import TypeVar

import jax
import numpy as np
from flax import nnx

from axon_dist.core.errors import ConfigError
from axon_dist.core.tree import leaves_with_paths
from axon_dist.core.typing import PyTree
from axon_dist.core.weighted import Count, Weighted

from ...step import TrainStep

_T = TypeVar("_T")

LAG = 2
"""The number of results left on the devices, so that neither the devices nor the host wait."""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The seconds of several calls, including the wait for their results.

    Args:
        seconds: one entry per timed call.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median; the figure to report."""
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """The minimum; the figure that other load on the machine affects least."""
        return min(self.seconds)


def time_step(function: Callable[[], object], num_calls: int = 10, warmup: int = 1) -> StepTime:
    """Times calls of a function, and waits for the result of each call.

    JAX returns from a call before the devices are done, so without waiting only the dispatch would
    be timed. The warm-up calls compile and are not counted.

    Args:
        function: takes no arguments and returns the arrays to wait for.
        num_calls: the number of timed calls.
        warmup: the number of calls before them.

    Raises:
        ConfigError: when there is nothing to time.

    Example:
        >>> import jax.numpy as jnp
        >>> time_step(lambda: jnp.ones(3) + 1, num_calls=5).median > 0
        True
    """
    if not 1 <= num_calls <= _MOST_CALLS or not 0 <= warmup <= _MOST_CALLS:
        raise ConfigError(
            f"time_step got num_calls={num_calls} and warmup={warmup}; num_calls must be 1 to "
            f"{_MOST_CALLS}, and warmup 0 to {_MOST_CALLS}",
            code="call-count",
        )
    for _ in range(warmup):
        jax.block_until_ready(function())
    return StepTime(tuple(_seconds(function) for _ in range(num_calls)))


_MOST_CALLS = 1_000_000


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def profile(directory: str | Path) -> AbstractContextManager[object]:
    """Traces the host and the devices inside the context, for Perfetto or XProf.

    Args:
        directory: the folder to write to; `tensorboard --logdir` (with the xprof plugin) and
            ui.perfetto.dev can read it.
    """
    return jax.profiler.trace(str(directory), create_perfetto_trace=False)


def model_flops_utilization(
    num_params: float,
    tokens_per_second: float,
    peak_flops: float,
    num_devices: int = 1,
    attention_flops: float = 0,
) -> float:
    """Estimates model FLOPs utilization (MFU), the share of the peak that the model itself needs.

    `(6 N + A) tokens / (t peak)`: for each token, every active parameter takes one multiply-add
    in the forward pass and two in the backward pass (arXiv:2001.08361, arXiv:2204.02311).
    Recomputation is not counted. Embedding tables are counted, although a lookup needs no FLOPs.

    Args:
        num_params: N, the active parameters per token; in a mixture of experts, only those of the
            token's experts.
        tokens_per_second: tokens per second over all devices.
        peak_flops: peak FLOP/s of one device, for the dtype in use.
        num_devices: the number of devices.
        attention_flops: A, the FLOPs per token for attention scores and the weighted sums of
            values.

    Returns:
        A number between 0 and 1, if the peak is correct.

    Example:
        >>> model_flops_utilization(1_000_000_000, 10_000, peak_flops=1e14, num_devices=2)
        0.3
    """
    flops = _flops_per_token(num_params, attention_flops)
    return flops * tokens_per_second / (peak_flops * num_devices)


def utilization_of(
    step: TrainStep, peak_flops: float | None, length: int | None = None
) -> Callable[[float], float] | None:
    """Returns a function that maps tokens per second to a step's MFU; None without a peak.

    Args:
        step: the step, with its model and devices. The `idle_share` of a module is the fraction of
            its parameters that is inactive for a token, as in `Experts`. The
            `attention_flops(length)` of a model are the FLOPs of attention per token, as in
            `Transformer`.
        peak_flops: peak FLOP/s of one device.
        length: tokens in a sequence; None omits attention.
    """
    if peak_flops is None:
        return None
    return functools.partial(
        model_flops_utilization,
        _num_counted(step),
        peak_flops=peak_flops,
        num_devices=step.world.size,
        attention_flops=_attention_flops(step, length),
    )


def useful_flops_per_token(step: TrainStep, length: int | None = None) -> float:
    """Returns the FLOPs per token that MFU counts, over all devices.

    The step of a run and the step of a plan count the same FLOPs. For the MFU, a run divides by the
    peak of its compute dtype, a plan by that of bfloat16.

    Args:
        step: the step, as for `utilization_of`.
        length: tokens in a sequence; None omits attention.
    """
    return _flops_per_token(_num_counted(step), _attention_flops(step, length))


def _flops_per_token(num_params: float, attention_flops: float) -> float:
    return 6 * num_params + attention_flops


def _num_counted(step: TrainStep) -> float:
    """Counts the active parameters; a frozen one counts as two thirds."""
    spec = step.model_spec
    # A frozen parameter needs no weight gradient, which is one of the three multiply-adds.
    return _num_active(spec.abstract, spec.params) + 2 / 3 * _num_active(spec.abstract, spec.frozen)


def _attention_flops(step: TrainStep, length: int | None) -> float:
    attention = getattr(step.model_spec.abstract, "attention_flops", None)
    return attention(length) if attention is not None and length else 0


def _num_active(model: nnx.Module, params: PyTree) -> float:
    """Counts the parameters that are active for a token."""
    idle = {
        "/".join(map(str, (*keys, name))): share
        for keys, module in nnx.iter_graph(model)
        for name, share in getattr(module, "idle_share", {}).items()
    }
    return sum((1 - idle.get(path, 0)) * leaf.size for path, leaf in leaves_with_paths(params))


def percentiles(seconds: Sequence[float]) -> dict[int, float]:
    """Returns the 50th, 90th, 99th and 100th percentiles, by nearest rank.

    A percentile is the least measured value that at least this percentage of values do not exceed.
    So of fewer than 100 values the 99th percentile is the largest.

    Example:
        >>> percentiles([0.1] * 98 + [0.5, 9.0])
        {50: 0.1, 90: 0.1, 99: 0.5, 100: 9.0}
    """
    ordered = sorted(seconds)
    count = len(ordered)
    return {p: ordered[-(-count * p // 100) - 1] for p in (50, 90, 99, 100) if ordered}


class StepProfile:
    """Records steps `at`, `at + 1`, ... as a trace that ui.perfetto.dev and XProf can read.

    The trace shows the scopes of a step: `microbatch`, `optimizer`, and in a pipeline its phases
    and transfers. The first step of a process is never traced, because it compiles.

    Args:
        at: the first traced step, counted from 1; 0 traces none.
        steps: the number of traced steps.
        directory: the folder to write into.
    """

    def __init__(self, at: int, steps: int, directory: str | Path | None):
        self._steps = range(at, at + steps) if at and directory is not None else range(0)
        self._count = steps
        self._is_asked = False
        self._listeners: list[Callable[[str], None]] = []
        self._directory = None if directory is None else str(directory)
        self._is_on = False
        self._traced: list[int] = []

    @contextmanager
    def on_signal(self, tell: Callable[[str], None]) -> Iterator[None]:
        """While the context lasts, SIGUSR1 starts a trace of the next steps.

        Args:
            tell: called with a message when a trace has ended.
        """
        self._listeners = [tell]
        if threading.current_thread() is not threading.main_thread() or self._directory is None:
            yield
            return

        def ask(number: int, frame: FrameType | None) -> None:
            self._is_asked = True

        before = signal.signal(signal.SIGUSR1, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, before)

    @contextmanager
    def around(self, number: int, settle: Callable[[], None]) -> Iterator[None]:
        """Traces the step in the context if it is one of the selected steps.

        Args:
            number: the number of the step, counted from 1.
            settle: waits until all steps taken have finished.
        """
        if self._is_asked and not self._is_on:
            self._is_asked = False
            self._steps = range(number, number + self._count)
        if number not in self._steps:
            yield
            return
        if not self._is_on:
            settle()
            assert self._directory is not None
            jax.profiler.start_trace(self._directory)
            self._is_on = True
            self._traced = []
        self._traced.append(number)
        with jax.profiler.StepTraceAnnotation("train_step", step_num=number):
            yield
        if number == self._steps[-1]:
            settle()
            self.close()

    def close(self) -> None:
        """Ends the current trace, even if its last step was not reached."""
        if self._is_on:
            message = f"traced steps {self._traced[0]} to {self._traced[-1]} into {self._directory}"
            self._is_on = False
            self._steps = range(0)
            try:
                jax.profiler.stop_trace()
            except (OSError, RuntimeError) as error:
                message = f"the trace is not written: {str(error).partition(chr(10))[0]}"
            for tell in self._listeners:
                tell(message)


class MetricSums:
    """Totals and weights of metrics, in float64.

    Example:
        >>> sums = MetricSums()
        >>> sums.add({"loss": Weighted(6.0, 2.0)})
        >>> sums.add({"loss": Weighted(1.0, 1.0)})
        >>> sums.means
        {'loss': 2.3333333333333335}
    """

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}
        self._counts: set[str] = set()

    def add(self, metrics: Mapping[str, Weighted]) -> None:
        """Adds the totals and weights of a batch, and waits for them.

        Args:
            metrics: the result of `evaluate_sums`.
        """
        for name, part in jax.device_get(dict(metrics)).items():
            if isinstance(part, Count):
                self._counts.add(name)
            sums = np.array([part.total, part.weight], np.float64)
            self._sums[name] = self._sums.get(name, np.zeros(2)) + sums

    @property
    def means(self) -> dict[str, float]:
        """`sum(totals) / sum(weights)` of every metric, or 0 if the weights sum to 0.

        A metric of `Count`s is `sum(totals)`.
        """
        sums = self._sums.items()
        quotients = {n: float(total / w) if w else 0.0 for n, (total, w) in sums}
        return quotients | {name: float(self._sums[name][0]) for name in self._counts}


def delayed(items: Iterable[_T], lag: int) -> Iterator[_T]:
    """Yields the items in order, each only after `lag` more have been produced.

    Args:
        items: the items, for instance arrays that are still being computed.
        lag: the number of items to produce ahead.

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
