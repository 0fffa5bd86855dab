import errno
import fcntl
import json
import os
import subprocess
import sys
import time

import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.train.app.lock import LOCK, locked

HOLDER = """
import sys, time
from pathlib import Path
from axon_dist.train.app.lock import locked
with locked(Path(sys.argv[1]), "run_dir", print):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    """Starts another process that has the folder's lock."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.full
def test_one_run_at_a_time_and_the_lock_of_a_killed_run_is_none(other, tmp_path):
    with (
        pytest.raises(ConfigError, match=rf"run_dir: '.*' is in use by process {other.pid} on \S+, "
                      r"since 2\d\d\d-.*; wait until it ends, stop it, or name another folder"),
        locked(tmp_path, "run_dir", print),
    ):  # fmt: skip
        raise AssertionError
    other.kill()
    other.wait()
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == other.pid
    with locked(tmp_path, "run_dir", print):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert not list(tmp_path.iterdir())


def test_a_lock_whose_file_cannot_be_read_is_still_one(tmp_path):
    with locked(tmp_path, "run_dir", print):
        (tmp_path / LOCK).write_text("{")
        wanted = pytest.raises(ConfigError, match=r"in use by another run, see '.*run.lock'")
        with wanted, locked(tmp_path, "run_dir", print):
            raise AssertionError


def test_it_is_given_back_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path, "run_dir", print):
        raise ZeroDivisionError
    with locked(tmp_path, "run_dir", print):
        pass


def test_without_locks_it_says_so(tmp_path, monkeypatch):
    def refuse(file, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    said = []
    with locked(tmp_path, "run_dir", said.append):
        pass
    assert "has no locks; make sure that no other run writes there" in said[0]


def test_a_lock_that_was_given_back_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    """The previous run removes its file after we open it and before we lock it."""
    flock, seen = fcntl.flock, []

    def slow(file, kind):
        if not seen:
            seen.append(time.time())
            (tmp_path / LOCK).unlink()
        return flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", slow)
    with locked(tmp_path, "run_dir", print):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.EBADF])
def test_a_lock_without_support_is_not_reported_as_another_run(tmp_path, monkeypatch, number):
    def fail(*_):
        raise OSError(number, "broken")

    monkeypatch.setattr("axon_dist.train.app.lock.fcntl.flock", fail)
    with (
        pytest.raises(ConfigError, match=r"run_dir: cannot determine .* cannot be locked: broken"),
        locked(tmp_path, "run_dir", print),
    ):
        pass


@pytest.mark.parametrize(
    "make", [lambda path: path.mkdir(), lambda path: path.symlink_to("/etc/passwd")]
)
def test_a_folder_at_the_place_of_the_lock_stays(tmp_path, make):
    make(tmp_path / "run.lock")
    with (
        pytest.raises(ConfigError, match=r"run_dir: cannot open the lock file .*run.lock'"),
        locked(tmp_path, "run_dir", print),
    ):
        pass
    assert (tmp_path / "run.lock").exists()
