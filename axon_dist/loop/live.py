"""A run on a terminal: a bar, the newest figures, and a spinner while something compiles."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from axon_dist.core.words import clock_time

from .progress import PlainProgress, Progress, SilentProgress, Status, status_parts


class LiveProgress:
    """Redraws two lines at the foot of a terminal, from a thread of its own.

    Args:
        console: of a terminal whose cursor can be moved.
        name: what the run is called.
    """

    def __init__(self, console: Console, name: str):
        self._console, self._name = console, name
        self._status: Status | None = None
        self._phase: _Spin | None = None
        self._start = time.monotonic()
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8)

    def __enter__(self) -> LiveProgress:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._phase = None
        self._live.stop()

    def phase(self, text: str) -> AbstractContextManager[None]:
        """Turns a spinner, and leaves a line that says how long it turned."""
        return self._spin(text)

    def update(self, status: Status) -> None:
        """Keeps the status for the next redraw; a new validation gets a line that stays."""
        before, self._status = self._status, status
        if status.validation_step not in (None, before and before.validation_step):
            step = f"validation after step {status.validation_step}"
            self._console.print(
                Text.assemble(f"{step}: ", (f"{status.validation_loss:.4f}", "bold"))
            )

    def note(self, text: str) -> None:
        """Prints the sentence above the bar."""
        self._console.print(Text(text, style="yellow"))

    @contextmanager
    def _spin(self, text: str) -> Iterator[None]:
        self._phase = _Spin(text)
        try:
            yield
            self._console.print(Text.assemble(("✓ ", "green"), self._phase.words()))
        finally:
            self._phase = None

    def _render(self) -> RenderableType:
        status, phase = self._status, self._phase
        lines: list[RenderableType] = [] if phase is None else [phase.spinner()]
        if status is not None:
            lines += [self._bar(status), _figures(status)]
        return Group(*lines)

    def _bar(self, status: Status) -> RenderableType:
        row = Table.grid(expand=True, padding=(0, 1))
        row.add_column()
        row.add_column(ratio=1)
        row.add_column(justify="right")
        times = f"{clock_time(time.monotonic() - self._start)} gone"
        if status.seconds_left is not None:
            times += f", {clock_time(status.seconds_left)} left"
        row.add_row(
            Text(self._name, style="bold"),
            ProgressBar(total=status.num_steps, completed=status.step),
            Text.assemble(f"{status.step}/{status.num_steps}", (f"  {times}", "dim")),
        )
        return row


class _Spin:
    def __init__(self, text: str):
        self._text, self._start = text, time.monotonic()
        self._spinner = Spinner("dots", style="cyan")

    def words(self) -> Text:
        return Text.assemble(self._text, (f"  {time.monotonic() - self._start:.1f} s", "dim"))

    def spinner(self) -> Spinner:
        self._spinner.update(text=self.words())
        return self._spinner


def _figures(status: Status) -> Text:
    parts = [part for part in status_parts(status) if not part.endswith(" left")]
    return Text("  ·  ").join(_figure(part) for part in parts)


def _figure(part: str) -> Text:
    """Sets the number of `loss 2.5` or `12k tokens/s` off from its words."""
    text = Text(part, style="dim")
    text.highlight_regex(r"(?<![\w.])[\d.]+\w?", style="not dim bold")
    return text


def make_progress(console: Console, name: str, every: float = 10.0) -> Progress:
    """Picks the live display on a terminal, plain lines elsewhere, silence on a quiet console.

    Args:
        console: where to.
        name: what the run is called.
        every: seconds between two plain lines.
    """
    if console.quiet:
        return SilentProgress()
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(console, name)
    return PlainProgress(lambda line: console.print(line, soft_wrap=True, highlight=False), every)
