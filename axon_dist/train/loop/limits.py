"""The options of a loop, and how all processes stop together between two steps."""

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
FINISHED = "finished"
"""The reason of a run that reached its last step."""
INTERRUPTIONS = frozenset({*(number.name for number in _SIGNALS), _ANOTHER})
"""Reasons for ending a run from outside: a signal here, or any stop of another process."""


class StopRequest:
    """Whether this process was asked to stop, and why."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def ask(self, reason: str) -> None:
        """Requests a stop; keeps the first reason."""
        self.reason = self.reason or reason

    def __bool__(self) -> bool:
        return self.reason is not None


@contextmanager
def stop_on_signals(on_first: Callable[[str], None] = lambda name: None) -> Iterator[StopRequest]:
    """Turns the first SIGINT (Ctrl-C), SIGTERM or SIGHUP into a request; later ones act as usual.

    Python handles signals between two calls of C. So a compile ends first, and equal signals during
    one compile count as one. A wakeup descriptor would count them all, but forked workers would
    write into it, too. It would also count one press twice: a launcher often forwards a Ctrl-C that
    the terminal has already sent to every process.

    After the first signal, any SIGHUP is ignored, even after the context: when a terminal closes,
    both the kernel and the shell send it, and a last save may still be running. A process that
    ignores SIGHUP, as under `nohup`, continues to ignore it.

    During a step, the buffers of the old state are donated, so an exception in the middle of a step
    would leave no state to save. Therefore the signal only sets a flag, which the loop reads
    between steps.

    `jax.distributed.initialize` handles SIGTERM as a preemption notice. This context replaces that
    handler while it lasts.

    Args:
        on_first: called with the name of the first signal, to inform the user. It runs in a
            separate thread, because the signal may have interrupted a write to the same file.

    Yields:
        The request, which is false until a signal arrives. Outside the main thread, where Python
        handles no signals, it stays false unless `ask` is called.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]

    def restore() -> None:
        # After a signal, keep ignoring SIGHUP: a save may still be running after the loop.
        had_signal = request.reason in INTERRUPTIONS - {_ANOTHER}
        for number, handler in before.items():
            if number != signal.SIGHUP or not had_signal:
                signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        # Do this first, because a second SIGHUP may follow immediately.
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
    """Decides once per step, for all processes together, whether any of them wants to stop.

    If one process left the loop on its own, the others would wait for it forever in the next
    collective. So every step starts a reduction over the devices, and reads the reduction that was
    started `lag` steps before. This never stalls a step, and every process reads the same answer
    at the same step. With a single process, the answer is immediate and needs no reduction.

    Args:
        world: the world whose processes must agree.
        lag: the number of steps between a question and its answer.

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
        """Starts the reduction of this step, and returns whether to stop now.

        Args:
            wanted: whether this process wants to stop.
        """
        if self.world.num_processes == 1:
            return wanted
        self._asked.append(self.any_rank([wanted] * self.world.size))
        return len(self._asked) > self.lag and bool(self._asked.popleft())

    @in_own_context
    def any_rank(self, wanted: Sequence[bool]) -> Array:
        """Starts the reduction; returns a scalar on every device, true if any rank wants to stop.

        Args:
            wanted: one entry per rank; only the entries of this process's own ranks are read.

        Example:
            >>> bool(StopConsensus(World.emulate(4)).any_rank([False, False, True, False]))
            True
        """
        flags = np.asarray(wanted)
        placed = jax.make_array_from_callback(flags.shape, self._split, lambda index: flags[index])
        return self._any(placed)


@dataclasses.dataclass(frozen=True)
class Stops:
    """Decides when a loop stops: after a signal, or because of the metrics of the run.

    Args:
        consensus: the consensus among the processes.
        request: the stop request of this process.
        should_stop: maps the latest record of metrics to whether to stop, or to the reason to
            stop; None never stops.
    """

    consensus: StopConsensus
    request: StopRequest
    should_stop: Callable[[Mapping[str, float]], bool | str] | None = None

    @property
    def reason(self) -> str:
        """The reason to stop: a signal, that of `should_stop`, or another process."""
        return self.request.reason or _ANOTHER

    def between_steps(self, latest: Mapping[str, float]) -> bool:
        """Whether to stop now; every process must call this before every step.

        Args:
            latest: the latest record; empty before the first record of training, and after a
                rollback until the next one.
        """
        wish = self.should_stop is not None and latest and self.should_stop(latest)
        if wish:
            self.request.ask(_reason_of(wish))
        return self.meanwhile()

    def meanwhile(self) -> bool:
        """Whether to stop during a longer operation between two steps, such as a validation."""
        return self.consensus(bool(self.request))


def _reason_of(wish: bool | str) -> str:
    """Returns the reason of a `should_stop`.

    It must not be taken for the end of the last step, or for a signal: these are compared.
    """
    if not isinstance(wish, str):
        return "should_stop"
    is_own = wish in (FINISHED, *INTERRUPTIONS)
    return f"should_stop: {wish}" if is_own else wish


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """How long a loop runs and how often it reports.

    Args:
        num_steps: the step to stop at, counted from the beginning of the run, not of this call.
        log_every: the number of steps that are averaged into one record.
        eval_every: steps between validations; with 0 the only validation is at the end. A value
            above 0 needs the trainer's `validation`.
        save_every: steps between saves; with 0 the only save is at the end. A value above 0 needs
            the trainer's `save`.
        copy_every: steps between copies; with 0 a copy is made only if the run ends early, but not
            after a nonfinite step. A value above 0 needs the trainer's `copy`.
        items_per_step: items in a global batch; None does not report throughput.
        item: the kind of items; utilization needs tokens.
        peak_flops: peak FLOP/s of one device, to compute utilization; None does not report it.
        sequence_length: tokens in a sequence, so that utilization includes attention; None omits
            attention.
        max_rollbacks: the maximum number of times that a run goes back to a checkpoint, if the
            step's `nonfinite` is `"rollback"`; after that the run stops.
        best_metric: the validation metric that ranks states, by the name that writers get.
        best_mode: `"min"` if smaller is better, `"max"` if larger is better.
        patience: the number of validations without improvement that ends the run; 0 for no limit.
        min_delta: the smallest improvement that counts.
        profile_at: the first traced step, counted from 1; 0 traces none.
        profile_steps: the number of traced steps.
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
        """Raises `ConfigError` unless all values are valid."""
        check_fields(self)
        for name, kind in _OPTIONS.items():
            kind.check("LoopOptions", name, getattr(self, name))
        if self.peak_flops is not None and (self.items_per_step is None or self.item != "tokens"):
            raise ConfigError(
                f"peak_flops={self.peak_flops} needs items_per_step in tokens to measure "
                f"utilization, but got items_per_step={self.items_per_step}, item={self.item!r}; "
                "set items_per_step and item='tokens', or leave peak_flops out",
                code="peak-flops-without-items",
            )
        if self.profile_at == self.profile_steps == 1:
            raise ConfigError(
                "profile_at=1 and profile_steps=1 (train.profile) trace nothing, because the first "
                "step of a process compiles and is never traced; raise one of them",
                code="profile-first-step",
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
"""Requirements of `LoopOptions` that its annotations do not express."""

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
            ("should_stop", "save", "copy", "give_back", "go_back", "earlier_counts", "is_saved"),
            FUNCTION.or_none(),
        ),
        "history": ArgumentKind(
            "a list of dicts, or something that yields them whenever it is iterated",
            lambda x: (
                all(isinstance(row, Mapping) for row in x)
                if isinstance(x, Sequence)
                else isinstance(x, Iterable) and not isinstance(x, Iterator)
            ),
        ),
    }
)
"""Requirements of the fields of a `Trainer`."""


def _has(value: object, *methods: str) -> bool:
    is_class = isinstance(value, type)
    return not is_class and all(callable(getattr(value, name, None)) for name in methods)
