"""Shows the progress of a run: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from axon_dist.core.words import byte_size, clock_time, duration, si


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """The status of a run; unknown values are None.

    Args:
        step: steps taken.
        num_steps: steps to take.
        loss: mean training loss of the last steps.
        validation_loss: the last validation loss.
        validation_step: the step after which the validation loss was measured.
        items_per_second: throughput of all devices over the last steps.
        item: the kind of items.
        step_seconds: mean seconds of the last steps.
        seconds_left: estimated seconds until the last step.
        device_bytes: bytes of the train state on the fullest device.
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
    """Shows the progress of a run; a context manager around the whole run."""

    def __enter__(self) -> Self:
        """Starts the display."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the display; the last status stays visible."""
        return

    def phase(self, text: str) -> AbstractContextManager[None]:
        """Shows a longer operation, such as compiling, while the context lasts."""
        return nullcontext()

    def update(self, status: Status) -> None:
        """Updates the status; called once per step, so it must be cheap."""
        return

    def note(self, text: str) -> None:
        """Shows a message that stays visible."""
        return


class SilentProgress(Progress):
    """Shows nothing."""


class PlainProgress(Progress):
    """Writes a status line every few seconds, for logs and pipes.

    Args:
        write: called with each line.
        every: seconds between two status lines.
        clock: returns the time in seconds; replaceable for tests.

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
        self._write = write
        self._interval = every
        self._clock = clock
        self._last: Status | None = None
        self._written: Status | None = None
        self._next_time = clock()

    def __exit__(self, *exception: object) -> None:
        if self._last is not None and self._last is not self._written:
            self._write(status_line(self._last))

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Writes a line when the operation begins, and a line with its duration when it ends."""
        start = self._clock()
        self._write(f"{text} ...")
        yield
        self._write(f"{text}: {self._clock() - start:.1f} s")

    def update(self, status: Status) -> None:
        """Writes the status if the last line is old enough or there is a new validation loss."""
        self._last = status
        if self._clock() >= self._next_time or _validation(status) != _validation(self._written):
            self._write(status_line(status))
            self._written = status
            self._next_time = self._clock() + self._interval

    def note(self, text: str) -> None:
        """Writes the message."""
        self._write(text)


def _validation(status: Status | None) -> tuple[int | None, float | None]:
    return (status.validation_step, status.validation_loss) if status else (None, None)


def status_line(status: Status) -> str:
    """Formats the status in one line.

    Example:
        >>> status_line(Status(step=3, num_steps=9, loss=2.5, items_per_second=12_345.0))
        'step 3/9  loss 2.500  12.3k tokens/s'
    """
    return "  ".join([f"step {status.step}/{status.num_steps}", *status_parts(status)])


def status_parts(status: Status) -> list[str]:
    """Formats each known value of a status."""
    known = (
        ("loss {}", "{:.3f}".format, status.loss),
        ("validation {}", "{:.3f}".format, status.validation_loss),
        (f"{{}} {status.item}/s", si, status.items_per_second),
        ("{}/step", duration, status.step_seconds),
        ("{}/device", byte_size, status.device_bytes),
        ("{} left", clock_time, status.seconds_left),
    )
    return [form.format(to_text(value)) for form, to_text, value in known if value is not None]


class LiveProgress(Progress):
    """Redraws two lines at the bottom of a terminal, in a thread.

    Args:
        console: the console of a terminal whose cursor can be moved.
        name: the name of the run.
    """

    def __init__(self, console: Console, name: str):
        self._console = console
        self._name = name
        self._status: Status | None = None
        self._phase: tuple[str, float] | None = None
        self._spinner = Spinner("dots", style="cyan")
        self._start = time.monotonic()
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._phase = None
        self._live.stop()

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Shows a spinner, then prints a line with the time taken."""
        self._phase = phase = text, time.monotonic()
        try:
            yield
            self._console.print(Text.assemble(("✓ ", "green"), _took(*phase)))
        finally:
            self._phase = None

    def update(self, status: Status) -> None:
        """Stores the status for the next redraw; prints a line for each new validation."""
        before = self._status
        self._status = status
        if status.validation_step not in (None, before and before.validation_step):
            step = f"validation after step {status.validation_step}"
            self._console.print(
                Text.assemble(f"{step}: ", (f"{status.validation_loss:.4f}", "bold"))
            )

    def note(self, text: str) -> None:
        """Prints the message above the bar."""
        self._console.print(Text(text, style="yellow"))

    def _render(self) -> RenderableType:
        # The redraw runs in a thread; read each field only once, because it may change.
        status = self._status
        phase = self._phase
        lines: list[RenderableType] = []
        if phase is not None:
            self._spinner.update(text=_took(*phase))
            lines.append(self._spinner)
        if status is not None:
            lines += [self._bar(status), _figures(status)]
        return Group(*lines)

    def _bar(self, status: Status) -> RenderableType:
        columns = Column(), Column(ratio=1), Column(justify="right")
        row = Table.grid(*columns, expand=True, padding=(0, 1))
        times = f"{clock_time(time.monotonic() - self._start)} elapsed"
        if status.seconds_left is not None:
            times += f", {clock_time(status.seconds_left)} left"
        row.add_row(
            Text(self._name, style="bold"),
            ProgressBar(total=status.num_steps, completed=status.step),
            Text.assemble(f"{status.step}/{status.num_steps}", (f"  {times}", "dim")),
        )
        return row


def _took(text: str, start: float) -> Text:
    return Text.assemble(text, (f"  {time.monotonic() - start:.1f} s", "dim"))


def _figures(status: Status) -> Text:
    """Formats the known values of a status, with the numbers in bold."""
    parts = [part for part in status_parts(status) if not part.endswith(" left")]
    text = Text("  ·  ".join(parts), style="dim")
    text.highlight_regex(r"(?<![\w.])[\d.]+\w?", style="not dim bold")
    return text


def make_progress(console: Console, name: str, every: float = 10.0) -> Progress:
    """Returns the live display for a terminal, plain lines elsewhere, none for a quiet console.

    Args:
        console: the console to write to.
        name: the name of the run.
        every: seconds between two plain lines.
    """
    if console.quiet:
        return SilentProgress()
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(console, name)
    return PlainProgress(lambda line: console.print(line, soft_wrap=True, highlight=False), every)
