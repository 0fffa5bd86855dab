import io
import math
import time

import pytest
from rich.console import Console

from axon_dist.train.loop import LiveProgress, PlainProgress, SilentProgress, Status, make_progress
from axon_dist.train.loop.progress import byte_size, clock_time, duration, si, status_line

FULL = Status(
    step=30, num_steps=100, loss=2.5, validation_loss=2.75, items_per_second=12_345.0,
    step_seconds=0.0834, seconds_left=75.0, device_bytes=12_400_000,
)  # fmt: skip


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)


def test_the_line_says_everything():
    assert status_line(FULL) == (
        "step 30/100  loss 2.500  validation 2.750  12.3k tokens/s  83.4 ms/step  "
        "12.4 MB/device  1:15 left"
    )


def test_plain_lines_come_every_few_seconds_and_at_the_end():
    now, lines = [0.0], []
    with PlainProgress(lines.append, every=10.0, clock=lambda: now[0]) as progress:
        for step in range(1, 26):
            progress.update(Status(step=step, num_steps=25))
            now[0] += 1.0
    assert lines == ["step 1/25", "step 11/25", "step 21/25", "step 25/25"]


def test_a_new_validation_loss_is_told_at_once():
    lines = []
    with PlainProgress(lines.append, every=1e9, clock=lambda: 0.0) as progress:
        progress.update(Status(step=1, num_steps=9))
        for step, loss in ((2, None), (3, 4.0), (4, 4.0), (5, 3.0)):
            progress.update(Status(step=step, num_steps=9, validation_loss=loss))
    assert lines == ["step 1/9", "step 3/9  validation 4.000", "step 5/9  validation 3.000"]


def test_plain_phases():
    now, lines = [0.0], []
    progress = PlainProgress(lines.append, clock=lambda: now[0])
    with progress.phase("compiling"):
        now[0] = 2.5
    assert lines == ["compiling ...", "compiling: 2.5 s"]
    with pytest.raises(ValueError, match="x"), progress.phase("failing"):
        raise ValueError("x")
    assert lines[-1] == "failing ..."


def test_live_shows_bar_figures_and_spinner():
    console = terminal()
    with LiveProgress(console, "quickstart") as progress:
        with progress.phase("compiling the train step"):
            time.sleep(0.3)
        progress.update(FULL)
        progress.note("SIGINT: stopping")
    text = console.file.getvalue()
    for words in (
        "✓ compiling the train step", "quickstart", "30/100", "1:15", "2.500", "validation 2.750",
        "12.3k tokens/s", "83.4 ms/step", "12.4 MB/device", "SIGINT: stopping",
    ):  # fmt: skip
        assert words in text


def test_live_leaves_no_tick_behind_a_failed_phase():
    console = terminal()
    with (
        pytest.raises(ValueError, match="x"),
        LiveProgress(console, "run") as progress,
        progress.phase("compiling"),
    ):
        raise ValueError("x")
    assert "✓" not in console.file.getvalue()


def test_the_display_fits_the_console():
    plain = Console(file=io.StringIO())
    assert isinstance(make_progress(terminal(), "x"), LiveProgress)
    assert isinstance(make_progress(plain, "x"), PlainProgress)
    assert isinstance(make_progress(Console(quiet=True), "x"), SilentProgress)
    with make_progress(plain, "x") as progress:
        progress.update(FULL)
    assert plain.file.getvalue() == status_line(FULL) + "\n"


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (si, 0, "0"), (si, 999.4, "999"), (si, 999.6, "1k"), (si, 2.5e13, "25T"),
        (byte_size, 0, "0 B"), (byte_size, 1500, "1.5 kB"), (duration, 5e-6, "5 us"),
        (duration, 0.5, "500 ms"), (duration, 12.34, "12.3 s"), (clock_time, 59.6, "1:00"),
        (clock_time, 7325, "2:02:05"), (si, 1.2e15, "1.2P"), (si, 6.3e24, "6.3Y"),
        (si, 2e28, "20000Y"), (si, math.nan, "nan"), (si, -math.inf, "-inf"),
        (si, 999.6e12, "1P"), (byte_size, 1.5e15, "1.5 PB"), (byte_size, 2.5e18, "2.5 EB"),
        (byte_size, math.nan, "nan B"), (duration, 999.6e-6, "1 ms"), (duration, 0.9997, "1 s"),
        (duration, 0.9994, "999 ms"), (duration, 59.94, "59.9 s"), (duration, 59.96, "1:00 min"),
        (duration, 1234.5, "20:34 min"), (duration, 3599.7, "1:00:00 h"),
        (duration, -0.25, "-250 ms"), (duration, math.nan, "nan s"), (duration, math.inf, "inf s"),
    ],
)  # fmt: skip
def test_numbers_for_people(function, value, text):
    assert function(value) == text


def test_every_validation_stays_on_screen():
    console = terminal()
    with LiveProgress(console, "run") as progress:
        for step, validation in ((1, None), (2, 2), (3, 2), (4, 4)):
            loss = None if validation is None else 2.5
            status = Status(
                step=step, num_steps=4, validation_loss=loss, validation_step=validation
            )
            progress.update(status)
    text = console.file.getvalue()
    assert text.count("validation after step 2: ") == 1
    assert text.count("validation after step 4: ") == 1
    assert " elapsed" in text
