"""What a run tells while it goes on: the protocol, and plain lines for logs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from axon_dist.core.words import byte_size, clock_time, duration, si


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """Where a run stands; what is not known yet is None.

    Args:
        step: steps taken.
        num_steps: steps to take.
        loss: mean training loss of the last steps.
        validation_loss: the last one measured.
        validation_step: after which step that was.
        items_per_second: through all devices, over the last steps.
        item: what they are.
        step_seconds: the mean of the last steps.
        seconds_left: until the last step, as fast as so far.
        device_bytes: of the train state, on the fullest device.
    """

    step: int
    num_steps: int
    loss: float | None = None
    validation_loss: float | None = None
    validation_step: int | None = None
    items_per_second: float | None = None
    item: str = "tokens"
    step_seconds: float | None = None
    seconds_left: float | None = None
    device_bytes: int | None = None


class Progress(Protocol):
    """Something that shows a run; a context that lasts as long as the run."""

    def __enter__(self) -> Progress:
        """Begins to show."""
        ...

    def __exit__(self, *exception: object) -> None:
        """Leaves the last state standing."""
        ...

    def phase(self, text: str) -> AbstractContextManager[None]:
        """Shows something that takes a while, such as compiling, as long as the context lasts."""
        ...

    def update(self, status: Status) -> None:
        """Takes the newest status; called once per step, so it must cost next to nothing."""
        ...

    def note(self, text: str) -> None:
        """Tells a sentence that stays."""
        ...


class SilentProgress:
    """Tells nothing."""

    def __enter__(self) -> SilentProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def phase(self, text: str) -> AbstractContextManager[None]:
        """Does nothing."""
        return nullcontext()

    def update(self, status: Status) -> None:
        """Does nothing."""

    def note(self, text: str) -> None:
        """Does nothing."""


class PlainProgress:
    """A line now and then, for logs and pipes.

    Args:
        write: takes a line.
        every: seconds between two status lines.
        clock: tells the seconds; a test may put its own.

    Example:
        >>> with PlainProgress(print) as progress:
        ...     progress.update(Status(step=1, num_steps=2, loss=5.5, step_seconds=0.25))
        step 1/2  loss 5.500  250 ms/step
    """

    def __init__(
        self,
        write: Callable[[str], None],
        every: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._write, self._every, self._clock = write, every, clock
        self._last: Status | None = None
        self._written: Status | None = None
        self._next_time = clock()

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._last is not None and self._last is not self._written:
            self._write(status_line(self._last))

    def phase(self, text: str) -> AbstractContextManager[None]:
        """Writes what begins, and how long it took."""
        return _PlainPhase(text, self._write, self._clock)

    def update(self, status: Status) -> None:
        """Writes the status if the last line is old enough, or the validation loss is new."""
        self._last = status
        if self._clock() >= self._next_time or _validation(status) != _validation(self._written):
            self._write(status_line(status))
            self._written = status
            self._next_time = self._clock() + self._every

    def note(self, text: str) -> None:
        """Writes the sentence."""
        self._write(text)


def _validation(status: Status | None) -> tuple[int | None, float | None]:
    return (status.validation_step, status.validation_loss) if status else (None, None)


class _PlainPhase:
    def __init__(self, text: str, write: Callable[[str], None], clock: Callable[[], float]):
        self._text, self._write, self._clock = text, write, clock

    def __enter__(self) -> None:
        self._start = self._clock()
        self._write(f"{self._text} ...")

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self._write(f"{self._text}: {self._clock() - self._start:.1f} s")


def status_line(status: Status) -> str:
    """The status in one line.

    Example:
        >>> status_line(Status(step=3, num_steps=9, loss=2.5, items_per_second=12_345.0))
        'step 3/9  loss 2.500  12.3k tokens/s'
    """
    return "  ".join([f"step {status.step}/{status.num_steps}", *status_parts(status)])


def status_parts(status: Status) -> list[str]:
    """What is known of a status, each in a few words."""
    known = {
        "loss {:.3f}": status.loss,
        "validation {:.3f}": status.validation_loss,
        f"{{}} {status.item}/s": _maybe(si, status.items_per_second),
        "{}/step": _maybe(duration, status.step_seconds),
        "{}/device": _maybe(byte_size, status.device_bytes),
        "{} left": _maybe(clock_time, status.seconds_left),
    }
    return [form.format(value) for form, value in known.items() if value is not None]


def _maybe(function: Callable[[float], str], value: float | None) -> str | None:
    return None if value is None else function(value)
