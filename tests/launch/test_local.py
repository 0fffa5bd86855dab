import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from axon_dist.core.errors import LaunchError
from axon_dist.launch import child, local
from axon_dist.launch.child import last_message
from axon_dist.launch.local import INTERRUPTED, LaunchPlan, launch, rank_environments
from axon_dist.launch.watchdog import EXIT_PEER_LOST

RANK = "import os, sys, time, signal; rank = int(os.environ['RANK']); "


def plan(tmp_path, program, count=3, **fields):
    command = (sys.executable, "-c", RANK + program)
    return LaunchPlan(command=command, num_processes=count, log_dir=tmp_path, grace=0.5, **fields)


def log(tmp_path, rank):
    return (tmp_path / f"rank-{rank}.log").read_text()


def test_ranks_of_the_second_host():
    made = LaunchPlan(command=("x",), nnodes=2, node_rank=1, master_addr="node0", num_processes=4)
    envs = rank_environments(made, {"AXON_CLUSTER": "none", "PATH": "p"}, 4, 29500)
    assert [env["RANK"] for env in envs] == ["4", "5", "6", "7"]
    assert [env["LOCAL_RANK"] for env in envs] == ["0", "1", "2", "3"]
    for env in envs:
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("8", "4")
        assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["PATH"]) == ("node0", "29500", "p")
        assert "AXON_CLUSTER" not in env
        assert "JAX_NUM_CPU_DEVICES" not in env


def test_each_rank_has_its_log(tmp_path):
    told = []
    made = plan(tmp_path, "print('I am', rank, os.environ['JAX_NUM_CPU_DEVICES'])",
                devices_per_process=2)  # fmt: skip
    assert launch(made, told.append) == 0
    assert [log(tmp_path, rank) for rank in range(3)] == [f"I am {rank} 2\n" for rank in range(3)]
    assert len(told) == 1


@pytest.mark.full
def test_rank_0_is_on_the_screen_too(tmp_path):
    program = (
        "from axon_dist.mesh import LaunchPlan, launch; import sys; "
        "launch(LaunchPlan(command=(sys.executable, '-c', 'import os; "
        'print("rank", os.environ["RANK"]); print("[Gloo] Rank noise")\'), num_processes=2, '
        f"log_dir=__import__('pathlib').Path({str(tmp_path)!r})), print)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)
    assert b"rank 0" in done.stdout
    assert b"rank 1" not in done.stdout
    assert b"Gloo" not in done.stdout
    assert "Gloo" in log(tmp_path, 0)


def test_one_failure_ends_all_with_its_code(tmp_path):
    told, started = [], time.monotonic()
    made = plan(tmp_path, "rank == 1 and sys.exit('axon: no luck'); time.sleep(100)")
    assert launch(made, told.append) == 1
    assert time.monotonic() - started < 30
    assert "rank 1 exited with code 1: no luck; ending the other ranks" in told[1]


def test_a_killed_rank_is_named(tmp_path):
    told = []
    made = plan(tmp_path, "rank == 2 and os.kill(os.getpid(), 9); time.sleep(100)")
    assert launch(made, told.append) == EXIT_PEER_LOST
    assert "rank 2 was killed by SIGKILL" in told[1]


def test_nothing_is_left_behind(tmp_path):
    program = (
        "import subprocess; "
        "rank == 0 and print(subprocess.Popen(['sleep', '100']).pid, flush=True); "
        "rank == 1 and time.sleep(1); sys.exit(3 * rank)"
    )
    assert launch(plan(tmp_path, program, count=2), lambda line: None) == 3
    grandchild = Path("/proc", log(tmp_path, 0).strip(), "stat")
    deadline = time.monotonic() + 30
    while grandchild.exists() and grandchild.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_restarts(tmp_path, monkeypatch):
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    program = "path = os.environ['MARK'] + str(rank); first = not os.path.exists(path); " \
        "open(path, 'w').close(); time.sleep(.3); rank == 1 and first and sys.exit(4)"  # fmt: skip
    told = []
    assert launch(plan(tmp_path, program, max_restarts=2), told.append) == 0
    assert told[2:] == ["restart 1 of 2, with 3 processes"]


def test_restarts_run_out(tmp_path):
    told = []
    assert launch(plan(tmp_path, "sys.exit(4)", count=1, max_restarts=2), told.append) == 4
    assert [line for line in told if line.startswith("restart")][
        -1
    ] == "restart 2 of 2, with 1 processes"


def test_ranks_run_where_the_launcher_has_no_standard_output(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert launch(plan(tmp_path, "print('hello')", count=1), [].append) == 0
    [log] = tmp_path.rglob("*.log")
    assert "hello" in log.read_text()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("numbers", "code"), [([15], 75), ([1] * 3, 75), ([15, 15], 143)])
def test_a_signal_while_ranks_are_started_ends_them(tmp_path, monkeypatch, count, numbers, code):
    """The signal comes after a rank has started, and before the launcher knows of the rank."""
    started = []

    def start(*arguments):
        started.append(local.start_child_as_it_is(*arguments))
        for number in numbers if len(started) == 1 else ():
            signal.raise_signal(number)
        return started[-1]

    monkeypatch.setattr(local, "start_child_as_it_is", local.start_child, raising=False)
    monkeypatch.setattr(local, "start_child", start)
    # The process that runs the tests may ignore this signal.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert launch(plan(tmp_path, "time.sleep(100)", count, max_restarts=3), print) == code
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(started) == 1
    assert started[0].code is not None


def test_asking_for_a_trace_ends_neither_the_launcher_nor_a_rank_that_starts(tmp_path):
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    told = []

    def tell(line):
        told.append(line)
        # The launcher already handles signals, and no rank has started.
        signal.raise_signal(signal.SIGUSR1)

    program = "os.kill(os.getpid(), signal.SIGUSR1)"
    try:
        assert launch(plan(tmp_path, program, count=2), tell) == 0
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told


def test_a_signal_that_ends_commands_that_save_nothing(tmp_path):
    """Such commands can be restarted just like those that saved their state."""
    program = "time.sleep(.3); rank or os.kill(os.getppid(), 15); time.sleep(100)"
    assert launch(plan(tmp_path, program, count=2, max_restarts=3), print) == INTERRUPTED


@pytest.mark.parametrize(
    ("handles", "code"), [("pass", INTERRUPTED), ("signal.signal(15, print)", 3)]
)
def test_a_signal_in_the_middle_of_a_start(tmp_path, handles, code):
    """Python may turn a KeyboardInterrupt during an import into any error, with any exit code."""
    program = (
        f"{handles}; signal.signal(2, lambda *a: sys.exit(3)); time.sleep(.3); "
        "rank or os.kill(os.getppid(), 2); time.sleep(100)"
    )
    assert launch(plan(tmp_path, program, count=2), print) == code


def test_the_launcher_lives_until_a_new_rank_is_watched():
    """Otherwise nothing would end the rank."""
    program = (
        "import os, signal; from axon_dist.launch import local\n"
        "with local._deferring_ends():\n"
        "    os.kill(os.getpid(), signal.SIGQUIT); print('watched', flush=True)\n"
        "print('goes on', flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGQUIT, "watched\n")


def test_a_full_disk_costs_lines_of_a_log(tmp_path):
    told = []
    output = child._Log(tmp_path / "rank-0.log", told.append)
    output.write(b"first\n")
    kept, output.descriptor = output.descriptor, os.open("/dev/full", os.O_WRONLY)
    output.write(b"lost\n")
    output.write(b"lost\n")
    os.close(output.descriptor)
    output.descriptor = kept
    output.write(b"last\n")
    output.close()
    assert log(tmp_path, 0) == "first\nlast\n"
    assert told == [f"{tmp_path}/rank-0.log: the log loses lines (No space left on device); "
                    "the ranks continue"]  # fmt: skip


def test_a_log_that_cannot_be_made_costs_its_lines(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(child, "open_regular", refuse)
    assert launch(plan(tmp_path, "print('x' * 10**5); sys.exit(0)", count=2), print) == 0


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path.parent / "mine")])
def test_a_log_that_is_no_file(tmp_path, make):
    (tmp_path / "mine").write_text("precious")
    make(tmp_path / "rank-0.log")
    with pytest.raises(LaunchError, match=r"cannot write the log .*rank-0.log'.*--log-dir"):
        launch(plan(tmp_path, "pass", count=1), print)
    assert (tmp_path / "mine").read_text() == "precious"


def test_control_characters_of_a_rank_stay_in_its_log(tmp_path):
    told = []
    made = plan(tmp_path, "print('axon: \\x1b]0;owned\\x07\\x1b[2Jred'); sys.exit(3)", count=1)
    assert launch(made, told.append) == 3
    assert "owned" in told[1]
    assert told[1].isprintable()


def test_a_mistake_of_the_user_is_not_repeated(tmp_path):
    told = []
    assert launch(plan(tmp_path, "sys.exit(2)", max_restarts=2), told.append) == 2
    assert not any("restart" in line for line in told)


@pytest.mark.full
def test_elastic_goes_on_without_the_lost(tmp_path):
    program = (
        "count = int(os.environ['WORLD_SIZE']); print(count, flush=True); "
        "rank == 1 and count == 4 and os.kill(os.getpid(), 9); "
        "count == 3 and sys.exit(2); count > 2 and time.sleep(100)"
    )
    told = []
    made = plan(tmp_path, program, count=4, max_restarts=1, elastic=True)
    assert launch(made, told.append) == 0
    assert log(tmp_path, 0).split() == ["4", "3", "2"]
    # A refused size does not count as a restart: if 4 of 8 can continue, 7, 6 and 5 are refused.
    assert [line for line in told if "restart" in line] == ["restart 1 of 1, with 3 processes"]
    assert told[-1] == "3 processes cannot continue this run; trying 2"


@pytest.mark.full
def test_signals_reach_the_ranks_and_end_the_restarts(tmp_path):
    program = (
        "signal.signal(15, lambda *a: sys.exit(print('saved', flush=True))); "
        "open(os.environ['MARK'] + str(rank), 'w').close(); time.sleep(100)"
    )
    starter = (
        "from axon_dist.mesh import LaunchPlan, launch; import sys; from pathlib import Path; "
        f"sys.exit(launch(LaunchPlan(command=(sys.executable, '-c', {RANK + program!r}), "
        f"num_processes=2, max_restarts=5, log_dir=Path({str(tmp_path)!r})), print))"
    )
    env = os.environ | {"MARK": str(tmp_path / "mark")}
    process = subprocess.Popen([sys.executable, "-c", starter], env=env)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("mark*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.terminate()
    assert process.wait(timeout=60) == 0
    assert [log(tmp_path, rank) for rank in range(2)] == ["saved\n"] * 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"command": ()}, r"no command; give one after --"),
        ({"num_processes": 0}, r"got 0 processes .* must be in 1\.\.4096"),
        ({"max_restarts": -1}, r"-1 restarts"),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "a"}, r"node rank 2 of 2 .* 0 to 1"),
        ({"nnodes": 2}, r"2 hosts cannot connect to localhost.*--master-addr"),
        ({"nnodes": 2, "master_addr": "a", "elastic": True}, r"elastic .* one host, .* has 2"),
        ({"devices_per_process": 0}, r"0 devices per process"),
        ({"master_port": 70000}, r"70000; set a port from 1"),
        ({"command": ("no-such-program",)}, r"no program 'no-such-program'; .* on the PATH"),
    ],
)
def test_wrong_plans(tmp_path, fields, words):
    with pytest.raises(LaunchError, match=words):
        launch(LaunchPlan(**{"command": ("true",), "log_dir": tmp_path} | fields), print)


@pytest.mark.full
def test_interrupted_ranks_are_no_failure(tmp_path):
    """The ranks end one after the other, each with its state saved, and no rank restarts."""
    said = []
    made = plan(tmp_path, "time.sleep(rank); print('saved'); sys.exit(75)", max_restarts=3)
    assert launch(made, said.append) == INTERRUPTED
    assert [log(tmp_path, rank) for rank in range(3)] == ["saved\n"] * 3
    assert not any("restart" in line or "ending" in line for line in said)


STOPPED = "os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.full
def test_a_stopped_rank_does_not_keep_a_lost_run(tmp_path):
    """Code 76 means that no state was saved: the other rank is killed, and the run restarts."""
    said = []
    program = f"{STOPPED} if rank else (time.sleep(.5), sys.exit(76))"
    assert launch(plan(tmp_path, program, count=2, max_restarts=1), said.append) == EXIT_PEER_LOST
    assert EXIT_PEER_LOST != INTERRUPTED
    assert "restart 1 of 1, with 2 processes" in said


@pytest.mark.parametrize(
    ("answer", "code"),
    [(STOPPED, 75), ("signal.signal(15, lambda *a: sys.exit(75)); time.sleep(100)", 75)],
)
def test_the_last_ranks_have_a_deadline(tmp_path, monkeypatch, answer, code):
    monkeypatch.setattr("axon_dist.launch.local._LAST_SECONDS", 1.0)
    said = []
    program = f"rank or sys.exit(75)\n{answer}"
    assert launch(plan(tmp_path, program, count=2), said.append) == code
    assert "ranks 1 did not end in time" in said[1]


def is_running(process):
    stat = Path("/proc", process, "stat")
    return stat.exists() and stat.read_text().split()[2] != "Z"


@pytest.mark.full
@pytest.mark.sample("9--9-")
@pytest.mark.parametrize(
    ("number", "code", "text"),
    [(signal.SIGHUP, 75, "saved"), (signal.SIGKILL, -9, ""), (signal.SIGQUIT, -3, "")],
)
def test_no_rank_outlives_the_launcher(tmp_path, number, code, text):
    program = (
        "import subprocess; "
        "signal.signal(1, lambda *a: (print('saved', flush=True), sys.exit(75))); "
        "other = subprocess.Popen(['sleep', '100'], stdout=subprocess.DEVNULL); "
        "print(os.getpid(), other.pid, os.environ['AXON_MEMORY'], flush=True); time.sleep(100)"
    )
    starter = (
        # The process that runs the tests may ignore these signals.
        "import signal, sys; [signal.signal(n, signal.SIG_DFL) for n in (1, 3)]; "
        "from axon_dist.launch.local import LaunchPlan, launch; "
        "from pathlib import Path; sys.exit(launch(LaunchPlan("
        f"command=(sys.executable, '-c', {RANK + program!r}), num_processes=2, max_restarts=1, "
        f"log_dir=Path({str(tmp_path)!r})), print))"
    )
    process = subprocess.Popen([sys.executable, "-c", starter])
    deadline = time.monotonic() + 60
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    while not all(path.exists() and path.read_text() for path in logs):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    started = [name for path in logs for name in path.read_text().split()]
    memory = Path(started[2])
    assert memory.is_dir()
    process.send_signal(number)
    assert process.wait(timeout=60) == code
    while any(is_running(name) for name in started) or memory.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert all(path.read_text().split()[3:] == text.split() for path in logs)


def test_a_terminal_that_is_gone_ends_nothing(tmp_path):
    def fail(line):
        raise OSError(5, "Input/output error")

    assert launch(plan(tmp_path, "sys.exit(3)", count=1, max_restarts=1), fail) == 3


ERROR = """Traceback (most recent call last):
  File "train.py", line 3, in loss
    raise KeyError(name)
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 5, in loss
E1122 22:25:11.837204   24304 service.cc:234] another thread
    raise ValueError(text)
ValueError: my loss is broken
and says so on two lines
--------------------
For simplicity, JAX has removed its internal frames from the traceback.
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ERROR, "ValueError: my loss is broken"),
        (ERROR + "axon: lost process 1\n", "lost process 1"),
        ("axon: error: no such key\nsome other line\n", "error: no such key"),
        ("one\n\ntwo\n\n", "two"),
        ("Traceback (most recent call last):\n  File", "  File"),
        ("", ""),
    ],
    ids=["traceback", "ours behind it", "ours", "plain", "cut off", "nothing"],
)
def test_the_last_lines_of_a_log_are_kept(tmp_path, text, words):
    (tmp_path / "log").write_text(text)
    assert last_message(tmp_path / "log") == words
