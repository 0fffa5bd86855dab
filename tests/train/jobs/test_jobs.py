"""Job files of every scheduler and config; write them: python -m tests.train.jobs.test_jobs."""

import concurrent.futures
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest
import yaml

from axon_dist.core.errors import LaunchError
from axon_dist.launch import INTERRUPTED, LaunchPlan, from_env, launch_hosts, read_hosts
from axon_dist.train.cli.main import main
from axon_dist.train.cli.verbs import VERBS
from axon_dist.train.jobs import SCHEDULERS, Job, check_job, jobset, submit_job

ROOT = pathlib.Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
GOLDEN = pathlib.Path(__file__).with_name("golden")


def job_of(path, **fields):
    """Returns a job for the config on two nodes, with as many GPUs as it emulates devices."""
    data = yaml.safe_load(path.read_text())
    gpus = max(data["devices"]["emulate"] // 2, 1)
    name = path.stem.replace("_", "-")
    relative = path.relative_to(ROOT)
    return Job(config=str(relative), name=name, nodes=2, gpus=gpus, efa=True, **fields)


def golden(scheduler, path):
    return GOLDEN / f"{path.stem}.{scheduler}"


# The first check imports SkyPilot, if it is installed, and its packages warn.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_job_file_of_a_config(name, path):
    text = SCHEDULERS[name].write(job_of(path))
    assert text == golden(name, path).read_text(), "python -m tests.train.jobs.test_jobs writes it"
    SCHEDULERS[name].check(text)


def test_every_scheduler_is_an_option():
    (verb,) = [verb for verb in VERBS if verb.name == "launch"]
    options = {name.removeprefix("--") for a in verb.arguments for name in a.names}
    assert set(SCHEDULERS) <= options


@pytest.mark.parametrize(
    ("code", "restarts", "is_queued"),
    [(0, 0, 0), (1, 0, 0), (2, 0, 0), (75, 99, 1), (76, 9, 1), (76, 10, 0), (137, 0, 1)],
)
def test_slurm_queues_it_again_after_a_signal_and_a_lost_process(
    tmp_path, code, restarts, is_queued
):
    programs = {"srun": f"echo $@ > ran; exit {code}", "scontrol": "echo $@ > asked"}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = Job(config="a b.yaml", overrides=("mesh.fsdp=-1",), shared=str(tmp_path), nodes=2)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    env["SLURM_RESTART_COUNT"] = str(restarts)
    script = SCHEDULERS["slurm"].write(job)
    done = subprocess.run(["bash", "-c", script], env=env, cwd=tmp_path)
    assert done.returncode == code
    assert "train a b.yaml devices.emulate=null mesh.fsdp=-1" in (tmp_path / "ran").read_text()
    assert (tmp_path / "asked").exists() == is_queued


def test_the_pods_of_a_jobset_find_each_other_and_know_the_codes():
    job = Job(config="c.yaml", nodes=4, gpus=8)
    spec = yaml.safe_load(SCHEDULERS["jobset"].write(job))["spec"]
    template = spec["replicatedJobs"][0]["template"]["spec"]
    (container,) = template["template"]["spec"]["containers"]
    read = from_env({v["name"]: v.get("value", "3") for v in container["env"]})
    assert (read.num_processes, read.process_id) == (4, 3)
    assert read.coordinator_address == "axon-node-0-0.axon:29500"
    assert container["command"] == list(job.command)
    rules = template["podFailurePolicy"]["rules"]
    codes = {r["onExitCodes"]["values"][0]: r["action"] for r in rules if "onExitCodes" in r}
    assert codes == {2: "FailJob", 75: "FailJob", 76: "Count"}
    actions = [(rule["name"], rule["action"]) for rule in spec["failurePolicy"]["rules"]]
    assert actions == [
        ("mistake", "FailJobSet"),
        ("interrupted", "RestartJobSetAndIgnoreMaxRestarts"),
        ("lost", "RestartJobSet"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("maxRestarts: 10", "maxRestart: 10", "spec.failurePolicy has no field 'maxRestart'"),
        ("maxRestarts: 10", "maxRestarts: ten", "must be a int"),
        ("action: RestartJobSet\n", "action: Restart\n", "must be one of FailJobSet"),
        ("restartPolicy: Never", "restartPolicy: OnFailure", "restartPolicy: Never"),
        ("v1alpha2", "v1", "is not a JobSet"),
    ],
)
def test_a_jobset_that_the_cluster_would_refuse(old, new, words):
    text = SCHEDULERS["jobset"].write(Job(config="c.yaml"))
    assert jobset.check(text)
    with pytest.raises(LaunchError, match=words.replace("'", ".")):
        jobset.check(text.replace(old, new))


def test_words_of_the_command_are_never_placeholders():
    overrides = ("name=WORDS", "run_dir={settings}")
    job = Job(config="configs/SETTINGS.yaml", overrides=overrides)
    for name in ("jobset", "slurm", "skypilot"):
        text = SCHEDULERS[name].write(job)
        for word in ("configs/SETTINGS.yaml", *overrides):
            assert text.count(word) == 1
    spec = yaml.safe_load(SCHEDULERS["jobset"].write(job))["spec"]
    pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"] == list(job.command)


@pytest.mark.parametrize("option", [["--elastic"], ["--rejoin-after", "60", "--elastic"]])
def test_elastic_is_refused_on_hosts(option, capsys):
    command = ["launch", "--hosts", "node0", "--max-restarts", "3", *option, "--", "true"]
    assert main(command) == 2
    assert "got hosts together with --elastic or --rejoin-after" in capsys.readouterr().err


def test_the_schema_of_kubernetes_takes_the_job_within_a_jobset():
    validate = pytest.importorskip("kubernetes_validate")
    spec = yaml.safe_load(SCHEDULERS["jobset"].write(Job(config="c.yaml", nodes=4)))["spec"]
    job = spec["replicatedJobs"][0]["template"]
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, **job}
    validate.validate(whole, "1.34", strict=True)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_skypilot_takes_the_task(path):
    pytest.importorskip("jsonschema")
    pytest.importorskip("sky.utils.schemas", reason="needs SkyPilot")
    check = SCHEDULERS["skypilot"].check
    text = golden("skypilot", path).read_text()
    assert check(text) == "the schemas of SkyPilot"
    with pytest.raises(LaunchError, match="'node' was unexpected"):
        check(text.replace("num_nodes:", "node:"))


def test_sbatch_checks_and_takes_the_file(tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text('#!/bin/sh\n[ "$1" = bad ] && exit 3; echo job 7 "$@"\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    file = tmp_path / "a.sbatch"
    file.write_text("")
    assert check_job(SCHEDULERS["slurm"], file) == ["sbatch --test-only"]
    assert submit_job(SCHEDULERS["slurm"], file) == f"job 7 {file}"
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho no such partition >&2; exit 3\n")
    with pytest.raises(LaunchError, match=r"rejects the job file .*code 3.*no such partition"):
        check_job(SCHEDULERS["slurm"], file)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(LaunchError, match="there is no sbatch on this machine"):
        submit_job(SCHEDULERS["slurm"], file)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nodes": 0}, "got 0 nodes"),
        ({"name": "My_Job"}, "a job cannot be called"),
        ({"shared": "runs"}, "must be an absolute path"),
        ({"overrides": ("a\nb",)}, "cannot be written into a job file"),
    ],
)
def test_jobs_that_cannot_be(fields, words):
    with pytest.raises(LaunchError, match=words):
        Job(**{"config": "c.yaml", **fields})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--slurm", "--nodes", "0"], "got 0 nodes with 8 GPUs for 24 hours"),
        (["--slurm", "--gpus", "0"], "got 1 nodes with 0 GPUs for 24 hours"),
        (["--slurm", "--hours", "0"], "got 1 nodes with 8 GPUs for 0 hours"),
        (["--slurm", "--name", ""], "a job cannot be called ''"),
        (["--slurm", "--image", "a"], "got --image, which has no effect on a job file of --slurm"),
        (["--slurm", "--accelerator", "H100"], "got --accelerator, which has no effect"),
        (["--jobset", "--accelerator", "H100"], "got --accelerator, which has no effect"),
        (["--jobset", "--hours", "2"], "got --hours, which has no effect on a job file of --jobse"),
        (["--skypilot", "--hours", "2"], "got --hours, which has no effect on a job file of --sky"),
        (["--slurm", "-n", "4"], "got --num-processes, which has no effect on a job file"),
        (["--slurm", "--max-restarts", "3"], "got --max-restarts, which has no effect on a job"),
        (["--gpus", "0"], "got --gpus without a scheduler"),
    ],
)
def test_options_that_a_job_file_does_not_take(tmp_path, capsys, arguments, words):
    out = tmp_path / "job"
    config = [str(ROOT / "configs" / "fsdp8.yaml")] if arguments[0] != "--gpus" else []
    first, *others = arguments
    outs = ["--out", str(out)] if config else []
    command = ["launch", first, *config, *others, *outs]
    assert main(command) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_the_options_of_each_scheduler_are_in_its_job_file(tmp_path):
    config = str(ROOT / "configs" / "fsdp8.yaml")
    values = {"nodes": "3", "gpus": "5", "image": "my/image", "accelerator": "B300", "hours": "7"}
    for name, scheduler in SCHEDULERS.items():
        used = {option: value for option, value in values.items() if option not in scheduler.unused}
        words = [word for option, value in used.items() for word in (f"--{option}", value)]
        out = tmp_path / name
        given = ["--out", str(out), "mesh=fsdp=-1", "train.global_batch=15"]
        assert main(["launch", f"--{name}", config, *words, *given]) == 0
        assert all(value in out.read_text() for value in used.values())


class FakeRay:
    """Runs the functions that Ray would run on other nodes in threads."""

    def __init__(self):
        self.pool = concurrent.futures.ThreadPoolExecutor()

    # The name of a node may resolve to its loopback address, so only Ray knows what others reach.
    util = types.SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")

    def init(self, address):
        assert address == "auto"

    def get(self, one):
        return [self.get(x) for x in one] if isinstance(one, list) else one.result()

    def remote(self, function):
        def run(*arguments):
            return self.pool.submit(function, *arguments)

        task = types.SimpleNamespace(remote=run)
        return types.SimpleNamespace(options=lambda **options: task)


def test_ray_starts_a_process_on_each_node_again_after_a_loss(tmp_path, monkeypatch):
    fake = FakeRay()
    group = types.SimpleNamespace(ready=lambda: fake.pool.submit(bool))
    modules = {
        "ray": fake,
        "ray.util": types.ModuleType("ray.util"),
        "ray.util.placement_group": types.SimpleNamespace(
            placement_group=lambda bundles, strategy: group
        ),
        "ray.util.scheduling_strategies": types.SimpleNamespace(
            PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: None
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    path = ROOT / "configs" / "launch" / "ray_train.py"
    spec = importlib.util.spec_from_file_location("ray_train", path)
    ray_train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ray_train)
    assert ray_train.COMMAND[:2] == ["axon", "train"]
    # The first start loses a process; each start records the variables that it got.
    script = f"""
echo $MASTER_ADDR $MASTER_PORT $WORLD_SIZE $RANK >> {tmp_path}/$RANK
[ $(wc -l < {tmp_path}/$RANK) -gt 1 ] || exit 76
"""
    monkeypatch.setattr(ray_train, "COMMAND", ["sh", "-c", script])
    assert ray_train.main(2, 8) == 0
    for rank in (0, 1):
        lines = (tmp_path / str(rank)).read_text().splitlines()
        assert lines == [f"10.0.0.1 29500 2 {rank}"] * 2


FAKE_SSH = """#!/bin/sh
[ "$3" = 127.0.0.9 ] && { echo "no route to host" >&2; exit 255; }
exec /bin/sh -c "$4"
"""

RANK = """
import os, signal, sys, time
from axon_dist import World
world = World.init("dp=-1")
import jax
from axon_dist.mesh import self_test
self_test(world, 60)
print("rank", os.environ["RANK"], "of", world.num_processes, os.getpid(), flush=True)
if os.environ["RANK"] == sys.argv[1]:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600 if int(sys.argv[1]) >= 0 else 0)
"""


@pytest.fixture
def over_ssh(tmp_path, monkeypatch):
    """Runs `axon launch --hosts` with an ssh that runs the command on this host."""
    (tmp_path / "ssh").write_text(FAKE_SSH)
    (tmp_path / "ssh").chmod(0o755)
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", python_path)
    monkeypatch.setenv("AXON_SILENCE_TIMEOUT", "5")

    def run(hosts, *command):
        arguments = ["--hosts", hosts, "--log-dir", str(tmp_path), "--grace", "2"]
        return main(["launch", *arguments, "--", *command])

    return run


def test_a_host_that_ssh_does_not_reach(tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text(FAKE_SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    plan = LaunchPlan(command=("true",), log_dir=tmp_path)
    words = r"cannot start on 127\.0\.0\.9: ssh says 'no route to host'"
    with pytest.raises(LaunchError, match=words):
        launch_hosts(["127.0.0.9"], plan, (), print)


@pytest.mark.parametrize(
    ("codes", "started", "code"),
    [((INTERRUPTED, 0), 1, INTERRUPTED), ((0, INTERRUPTED), 1, INTERRUPTED), ((76, 76), 3, 76)],
    ids=["interrupted on 0", "interrupted on 1", "lost"],
)
def test_only_a_lost_run_starts_again_on_hosts(codes, started, code, tmp_path, monkeypatch):
    """A run that was interrupted has saved, as on one host."""
    log = tmp_path / "started"
    cases = "".join(f"10.0.0.{rank}) exit {each};; " for rank, each in enumerate(codes))
    (tmp_path / "ssh").write_text(f'#!/bin/sh\necho "$3" >> {log}\ncase "$3" in {cases} esac\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    plan = LaunchPlan(command=("true",), log_dir=tmp_path, max_restarts=2, grace=0.1)
    hosts = [f"10.0.0.{rank}" for rank in range(2)]
    assert launch_hosts(hosts, plan, (), print) == code
    assert log.read_text().split().count(hosts[0]) == started


def test_hosts_are_read_from_a_file_as_from_an_option(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# of the cluster\nnode0 slots=8\n\nme@node1\n")
    assert read_hosts(None, file) == read_hosts("node0, me@node1", None) == ("node0", "me@node1")
    for text, words in (("", "got no host"), ("a,a", "got a host twice"), ("a b", "a host is")):
        with pytest.raises(LaunchError, match=words):
            read_hosts(text, None)


@pytest.mark.multiprocess
def test_two_hosts_meet_and_none_is_left_behind_when_a_rank_is_killed(over_ssh, tmp_path, capfd):
    code = over_ssh("127.0.0.2,127.0.0.3", sys.executable, "-c", RANK, "1")
    told = capfd.readouterr().err
    assert code == 76, told
    assert "127.0.0.3: rank 1 was killed by SIGKILL" in told
    logs = [(tmp_path / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    said = [next(x for x in log.splitlines() if x.startswith("rank ")).split() for log in logs]
    assert [words[1:4] for words in said] == [["0", "of", "2"], ["1", "of", "2"]]
    for words in said:
        assert not pathlib.Path("/proc", words[4]).exists()


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for config in CONFIGS:
        for scheduler, row in SCHEDULERS.items():
            golden(scheduler, config).write_text(row.write(job_of(config)))
    print(json.dumps({"written": len(list(GOLDEN.iterdir())), "interrupted": INTERRUPTED}))
