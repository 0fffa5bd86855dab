"""The launcher's folder in host memory, and its use by a run that has shrunk."""

import os
import sys
import tempfile
import types
from pathlib import Path

import pytest

from axon_dist.core.errors import LaunchError
from axon_dist.launch import MEMORY, PLANNED, LaunchPlan, launch
from axon_dist.launch.child import Child
from axon_dist.launch.local import has_progressed, host_folder, may_end_at_once

# Each start records its environment; the first one dies, a start of two waits for the stop signal.
STOPS = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))"
PROGRAM = f"""
import os, pathlib, signal, sys, time
folder, rank, size = os.environ[{MEMORY!r}], os.environ["RANK"], os.environ["WORLD_SIZE"]
{STOPS}
log = pathlib.Path(sys.argv[1], rank)
starts = len(log.read_text().splitlines()) if log.exists() else 0
with log.open("a") as file:
    print(size, os.environ[{PLANNED!r}], folder, os.path.isdir(folder), file=file)
pathlib.Path(folder, rank + ".copy").touch()
if size == "3" and not starts:
    while len(list(pathlib.Path(folder).glob("*.copy"))) < 3:
        time.sleep(0.01)
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
if size == "2" or not starts:
    time.sleep(60)
"""


def run(tmp_path, program=PROGRAM, **options):
    told, starts = [], tmp_path / "starts"
    starts.mkdir()
    command = (sys.executable, "-c", program, str(starts))
    plan = LaunchPlan(
        command=command, num_processes=3, max_restarts=1, log_dir=tmp_path / "logs", **options
    )
    code = launch(plan, told.append)
    return code, told, [path.read_text().splitlines() for path in sorted(starts.iterdir())]


def test_a_lost_rank_restarts_with_the_same_memory(tmp_path):
    code, told, starts = run(tmp_path, grace=0.0)
    assert code == 0
    assert [len(lines) for lines in starts] == [2, 2, 2]
    assert len({line for lines in starts for line in lines}) == 1
    size, planned, folder, existed = starts[0][0].split()
    assert (size, planned, existed, Path(folder).exists()) == ("3", "3", "True", False)
    assert "restart 1 of 1, with 3 processes" in told


@pytest.mark.parametrize("program", [PROGRAM, PROGRAM.replace(STOPS, "")])
def test_ranks_that_were_lost_come_back_between_two_steps(tmp_path, program):
    code, told, starts = run(tmp_path, program, elastic=True, rejoin_after=1.0, grace=0.0)
    assert code == 0
    assert [[line.split()[:2] for line in lines] for lines in starts] == [
        [["3", "3"], ["2", "3"], ["3", "3"]],
        [["3", "3"], ["2", "3"], ["3", "3"]],
        [["3", "3"], ["3", "3"]],
    ]
    assert told[-3:] == [
        "restart 1 of 1, with 2 processes",
        "stopping 2 processes after this step, so that others can rejoin",
        "continuing with all 3 processes",
    ]


@pytest.mark.parametrize(
    ("code", "has_copy", "at_once"),
    [(-9, True, True), (-9, False, False), (-6, True, False), (1, True, False), (75, True, False)],
)
def test_only_what_a_signal_killed_ends_the_others_at_once(tmp_path, code, has_copy, at_once):
    if has_copy:
        (tmp_path / "step_00000002-a-0.copy").touch()
    process = types.SimpleNamespace(poll=lambda: code)
    failed = Child(0, process, tmp_path / "log")  # pyright: ignore[reportArgumentType]
    assert may_end_at_once(failed, str(tmp_path)) == at_once
    assert not may_end_at_once(failed, None)


def test_a_run_gets_ahead_once_it_has_made_a_copy_of_its_own(tmp_path):
    assert has_progressed(None, 1e9)
    assert has_progressed(str(tmp_path), 1e9)
    copy = tmp_path / "step_00000002-a-0.copy"
    copy.touch()
    os.utime(copy, (1000, 1000))
    assert not has_progressed(str(tmp_path), 2000.0)
    assert has_progressed(str(tmp_path), 500.0)


def test_rejoining_needs_a_run_that_can_shrink():
    for elastic, seconds in ((False, 5.0), (True, 0.0)):
        with pytest.raises(LaunchError, match=r"rejoin_after=.*--elastic --rejoin-after 600"):
            LaunchPlan(command=("true",), elastic=elastic, rejoin_after=seconds)


def test_only_leftovers_of_a_killed_launcher_are_removed():
    with tempfile.TemporaryDirectory() as root:
        left = Path(root, f"axon-{os.getuid()}-left")
        left.mkdir()
        (left / "lock").touch()
        unlocked = Path(root, f"axon-{os.getuid()}-unlocked")
        unlocked.mkdir()
        os.utime(unlocked, (0, 0))
        other = Path(root, "axon-other")
        other.mkdir()
        with host_folder(Path(root)) as first:
            assert not left.exists()
            assert not unlocked.exists()
            with host_folder(Path(root)) as second:
                assert first != second
                assert first.exists()
            assert oct(first.stat().st_mode)[-3:] == "700"
        assert list(Path(root).iterdir()) == [other]


def test_a_host_without_such_memory_has_none(tmp_path):
    with host_folder(tmp_path / "nothing") as folder:
        assert folder is None


def test_leavings_of_strangers_are_passed_over(tmp_path, monkeypatch):
    """Ignores a pipe, a link or another user's folder with the name of a launcher's folder."""
    mine, root = tmp_path / "mine", tmp_path / "root"
    prefix = f"axon-{os.getuid()}-"
    mine.mkdir()
    root.mkdir()
    (root / f"{prefix}linked").symlink_to(mine)
    piped = root / f"{prefix}piped"
    piped.mkdir()
    os.mkfifo(piped / "lock")
    for folder in (mine, piped):
        os.utime(folder, (0, 0))
    with host_folder(root) as folder:
        assert folder is not None
    assert not list(mine.iterdir())
    assert piped.exists()
    (piped / "lock").unlink()
    os.utime(piped, (0, 0))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with host_folder(root):
        assert piped.exists()
        assert not list(piped.iterdir())
