import os
import pathlib
import re
import subprocess
import sys
from unittest import mock

import pytest
import yaml

from axon_dist.launch import INTERRUPTED, LaunchPlan, from_env
from axon_dist.launch.local import USER_ERROR
from axon_dist.launch.watchdog import EXIT_PEER_LOST
from axon_dist.train.cli import launching
from axon_dist.train.cli.main import main
from axon_dist.train.config import load_config


def test_the_command_follows_two_dashes(tmp_path):
    options = ["-n", "4", "--devices-per-process", "2", "--max-restarts", "3", "--elastic"]
    with mock.patch.object(launching, "launch", return_value=7) as launch:
        code = main(["launch", *options, "--log-dir", str(tmp_path), "--", "axon", "train", "-x"])
    plan = launch.call_args.args[0]
    assert code == 7
    assert plan == LaunchPlan(
        command=("axon", "train", "-x"),
        num_processes=4,
        devices_per_process=2,
        max_restarts=3,
        elastic=True,
        log_dir=tmp_path,
    )


def test_it_runs(tmp_path, capfd):
    program = "import os; print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    options = ["-n", "2", "--log-dir", str(tmp_path / "logs")]
    assert main(["launch", *options, "--", sys.executable, "-c", program]) == 0
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "1 of 2\n"
    assert f"2 processes; their logs: {tmp_path}/logs/rank-*.log" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "got no command; give one after --"),
        (["-n", "0", "--", "true"], "got 0 processes"),
        (["-n", "2", "--", "no-such-program"], "there is no program 'no-such-program'"),
    ],
)
def test_mistakes(arguments, words, capsys):
    assert main(["launch", *arguments]) == 2
    assert words in capsys.readouterr().err


TEMPLATES = pathlib.Path(__file__).parents[3] / "configs" / "launch"
SCRIPTS = sorted(p for p in TEMPLATES.iterdir() if p.suffix in (".sh", ".sbatch"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_scripts_are_bash(path):
    subprocess.run(["bash", "-n", path], check=True)


def written_commands():
    """Returns every `axon train` command of a template, as words."""
    for path in SCRIPTS:
        text = re.sub(r"\\\n", " ", path.read_text())
        yield from ((path.name, found) for found in re.findall(r"axon train ([^\"\n]+)", text))
    azure = yaml.safe_load((TEMPLATES / "azure_ml.yaml").read_text())
    yield "azure_ml.yaml", azure["command"].removeprefix("axon train ")
    _, job = yaml.safe_load_all((TEMPLATES / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    yield "kubernetes.yaml", " ".join(container["command"][2:])


@pytest.mark.parametrize(("name", "words"), list(written_commands()), ids=lambda text: text[:12])
def test_templates_train_on_the_devices_that_there_are(name, words):
    assert "--resume" in words, "a restart would begin anew"
    assert "run_dir=" in words
    config, *rest = words.split()
    overrides = [word for word in rest if re.fullmatch(r"[a-z_.]+=[^$]+", word)]
    read = load_config(TEMPLATES.parent / pathlib.Path(config).name, overrides)
    assert read.devices.emulate is None
    assert str(read.mesh) == "fsdp=-1"


def test_kubernetes_starts_interrupted_runs_again_and_mistakes_not():
    _, job = yaml.safe_load_all((TEMPLATES / "kubernetes.yaml").read_text())
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    rules = {
        tuple(rule["onExitCodes"]["values"]): (rule["action"], rule["onExitCodes"]["operator"])
        for rule in spec["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule and rule["onExitCodes"]["containerName"] == container["name"]
    }
    # `Ignore` makes a new pod and does not count against backoffLimit.
    assert rules == {(INTERRUPTED,): ("Ignore", "In"), (USER_ERROR,): ("FailJob", "In")}
    # The API server accepts a podFailurePolicy only with this restart policy.
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert "--resume=auto" in container["command"]


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [
        (0, 0, False),
        (2, 0, False),
        (INTERRUPTED, 0, True),
        (INTERRUPTED, 99, True),
        (EXIT_PEER_LOST, 9, True),
        (EXIT_PEER_LOST, 10, False),
        (137, 0, True),
        (137, 10, False),
    ],
)
def test_slurm_queues_interrupted_runs_again(tmp_path, code, restarts, requeued):
    """Runs the script as `sbatch` does, with programs that replace SLURM's."""
    programs = {"srun": f"exit {code}", "scontrol": f"echo $@ >> {tmp_path}/asked"}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    env["SLURM_RESTART_COUNT"] = str(restarts)
    done = subprocess.run(["bash", TEMPLATES / "slurm.sbatch"], env=env, cwd=tmp_path)
    assert done.returncode == code
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 7\n" if requeued else "")


def test_kubernetes_pods_know_their_place():
    service, job = yaml.safe_load_all((TEMPLATES / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    variables = {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}
    spec = from_env({**variables, "RANK": "1"})
    assert spec.num_processes == job["spec"]["completions"]
    assert spec.coordinator_address == "axon-0.axon:29500"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
