"""How long a loop runs: its options, and stopping between two steps, everywhere at once."""

from __future__ import annotations

import collections
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from axon_dist.core.checks import COUNT, FUNCTION, SIZE, ArgumentKind, check_fields
from axon_dist.core.errors import ConfigError
from axon_dist.core.own_context import in_own_context
from axon_dist.core.typing import Array
from axon_dist.mesh import World

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ANOTHER = "another process"
INTERRUPTIONS = frozenset({*(number.name for number in _SIGNALS), _ANOTHER})
"""The reasons of runs that a signal has ended, here or in another process."""


class StopRequest:
    """Whether this process was asked to stop, and by what."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def ask(self, reason: str) -> None:
        """Asks; the first reason stays."""
        self.reason = self.reason or reason

    def __bool__(self) -> bool:
        return self.reason is not None


@contextmanager
def stop_on_signals(on_first: Callable[[str], None] = lambda name: None) -> Iterator[StopRequest]:
    """Turns the first SIGINT (Ctrl-C), SIGTERM or SIGHUP into a request; a second acts as usual.

    A second SIGHUP does nothing, also after the context: a terminal that closes sends it by its
    kernel and by its shell, and a last save may still be under way. A process that ignores SIGHUP,
    as under `nohup`, goes on ignoring it.

    A step that has begun holds donated buffers: an exception in the middle of it would leave no
    state to save. So the signal only sets a flag, which the loop reads between steps.

    `jax.distributed.initialize` takes SIGTERM for its own preemption notice, so entering this
    context puts ours in its place for as long as it lasts.

    Args:
        on_first: called with the name of the first signal, to tell the user; in a thread of its
            own, for the signal may have come in the middle of a write to the same file.

    Yields:
        The request; false until a signal came. Outside the main thread, where Python takes no
        signals, it stays false unless `ask` is called.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]

    def restore() -> None:
        # It stays ignored: what the loop has begun to save may still be written when it has ended.
        is_second = request.reason in INTERRUPTIONS - {_ANOTHER}
        for number, handler in before.items():
            if number != signal.SIGHUP or not is_second:
                signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        # First of all, for the second one may come at once.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        request.ask(signal.Signals(number).name)
        restore()
        name = signal.Signals(number).name
        threading.Thread(target=on_first, args=(name,)).start()

    for number in before:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        restore()


class StopConsensus:
    """One answer for all processes to "does anyone want to stop?", asked once per step.

    If one process left the loop alone, the others would wait for it in the next collective for
    good. Here every step starts a reduction over the devices and reads the one that was started
    `lag` steps before: it never stalls a step, and every process reads the same answer at the same
    step. A process that is alone answers itself at once.

    Args:
        world: whose processes have to agree.
        lag: steps between a question and its answer.

    Example:
        >>> consensus = StopConsensus(World.emulate(8))
        >>> consensus(False), consensus(True)
        (False, True)
    """

    def __init__(self, world: World, lag: int = 2):
        self.world: World = world
        self.lag: int = lag
        self._split = NamedSharding(world.mesh, PartitionSpec(world.mesh.axis_names))
        self._any = jax.jit(jnp.any, out_shardings=NamedSharding(world.mesh, PartitionSpec()))
        self._asked: collections.deque[Array] = collections.deque()

    def __call__(self, wanted: bool) -> bool:
        """Asks for this step, and returns whether to stop now.

        Args:
            wanted: whether this process wants to stop.
        """
        if self.world.num_processes == 1:
            return wanted
        self._asked.append(self.any_rank([wanted] * self.world.size))
        return len(self._asked) > self.lag and bool(self._asked.popleft())

    @in_own_context
    def any_rank(self, wanted: Sequence[bool]) -> Array:
        """Starts the reduction: a scalar on every device, true if any rank wants to stop.

        Args:
            wanted: one entry per rank; only those of this process's own ranks are read.

        Example:
            >>> bool(StopConsensus(World.emulate(4)).any_rank([False, False, True, False]))
            True
        """
        flags = np.asarray(wanted)
        placed = jax.make_array_from_callback(flags.shape, self._split, lambda index: flags[index])
        return self._any(placed)


@dataclasses.dataclass(frozen=True)
class Stops:
    """Says when a loop has to stop: after a signal, or by the metrics of the run.

    Args:
        consensus: among the processes.
        request: of this process.
        should_stop: reads the latest record of metrics; None never stops.
    """

    consensus: StopConsensus
    request: StopRequest
    should_stop: Callable[[Mapping[str, float]], bool] | None = None

    @property
    def reason(self) -> str:
        """What asked: a signal, `should_stop`, or another process."""
        return self.request.reason or _ANOTHER

    def between_steps(self, latest: Mapping[str, float]) -> bool:
        """Whether to stop now; every process must ask before every step.

        Args:
            latest: the latest record; empty before the first.
        """
        if self.should_stop is not None and latest and self.should_stop(latest):
            self.request.ask("should_stop")
        return self.meanwhile()

    def meanwhile(self) -> bool:
        """The same question during a longer operation between two steps, such as a validation."""
        return self.consensus(bool(self.request))


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """How long a loop runs and how often it reports.

    Args:
        num_steps: the step to stop at, counted from the first of the state.
        log_every: steps averaged into one record.
        eval_every: steps between validations; 0 validates only at the end. More than 0 needs a
            `validation` of the trainer.
        save_every: steps between saves; 0 saves only at the end. More than 0 needs a `save` of the
            trainer.
        copy_every: steps between copies; 0 makes none. More than 0 needs a `copy` of the trainer.
        items_per_step: items in a global batch; None leaves the throughput out.
        item: what they are; utilization is that of tokens.
        peak_flops: FLOP/s of one device at best, to measure utilization against; None leaves it
            out.
        sequence_length: tokens of a sequence, so that utilization counts attention; None leaves
            attention out.
        max_rollbacks: how often a run goes back to a checkpoint, where the step's `nonfinite` says
            so; after that it stops.
        best_metric: the metric of validations by which a state is the best, as writers get it.
        best_mode: `"min"` where less of it is better, `"max"` where more is.
        patience: so many validations without a better number end the run; 0 lets it go on.
        min_delta: by so much a number has to be better to count for that.
        profile_at: the first step that is traced, counted from 1; 0 traces none.
        profile_steps: how many are traced.
    """

    num_steps: int
    _: dataclasses.KW_ONLY
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 0
    copy_every: int = 0
    items_per_step: int | None = None
    item: str = "tokens"
    peak_flops: float | None = None
    sequence_length: int | None = None
    max_rollbacks: int = 3
    best_metric: str = "validation/loss"
    best_mode: Literal["min", "max"] = "min"
    patience: int = 0
    min_delta: float = 0.0
    profile_at: int = 0
    profile_steps: int = 3

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises `ConfigError` unless the counts are possible."""
        check_fields(self)
        for name, kind in _OPTIONS.items():
            kind.check("LoopOptions", name, getattr(self, name))
        if self.peak_flops is not None and (self.items_per_step is None or self.item != "tokens"):
            raise ConfigError(
                f"peak_flops={self.peak_flops} needs items_per_step in tokens to measure "
                f"utilization, and got {self.items_per_step} {self.item}; set it"
            )


_OPTIONS = {
    **dict.fromkeys(("num_steps", "log_every", "profile_steps", "max_rollbacks"), COUNT),
    **dict.fromkeys(("eval_every", "save_every", "copy_every", "profile_at", "patience"), SIZE),
    **dict.fromkeys(("items_per_step", "sequence_length"), COUNT.or_none()),
    "min_delta": ArgumentKind("a number, at least 0", lambda x: x >= 0),
    "best_metric": ArgumentKind(
        "a metric of validations, such as 'validation/loss'", lambda x: x.startswith("validation/")
    ),
}
"""What their annotations do not say of `LoopOptions`."""

BATCHES = ArgumentKind(
    'an iterable of batches, such as a loader or a list of {"x": ..., "y": ...}',
    lambda x: isinstance(x, Iterable) and not isinstance(x, (str, bytes, Mapping, type)),
)
STATE = ArgumentKind(
    "a TrainState, such as step.init()", lambda x: hasattr(x, "step") and hasattr(x, "params")
).or_none()
KINDS: MappingProxyType[str, ArgumentKind] = MappingProxyType(
    {
        "step": ArgumentKind(
            "a TrainStep, which build_train_step makes", lambda x: _has(x, "evaluate_sums")
        ),
        "batches": BATCHES,
        "options": ArgumentKind("LoopOptions(num_steps=...)", lambda x: isinstance(x, LoopOptions)),
        "validation": ArgumentKind(
            "a function of no arguments that returns batches, such as lambda: batches, or several "
            "by name",
            lambda x: all(map(callable, x.values())) if isinstance(x, Mapping) else callable(x),
        ).or_none(),
        "writers": ArgumentKind(
            "a list of writers, each with write(step, metrics) and close()",
            lambda x: isinstance(x, Sequence) and all(_has(one, "write", "close") for one in x),
        ),
        "progress": ArgumentKind(
            "a Progress, such as SilentProgress()", lambda x: _has(x, "phase", "update", "note")
        ),
        **dict.fromkeys(
            ("should_stop", "save", "copy", "give_back", "go_back"), FUNCTION.or_none()
        ),
        "history": ArgumentKind(
            "a list of dicts",
            lambda x: isinstance(x, Sequence) and all(isinstance(row, Mapping) for row in x),
        ),
    }
)
"""What the fields of a `Trainer` can be."""


def _has(value: object, *methods: str) -> bool:
    is_class = isinstance(value, type)
    return not is_class and all(callable(getattr(value, name, None)) for name in methods)
