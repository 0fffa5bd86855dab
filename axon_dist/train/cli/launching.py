"""The verb `axon launch`: starts processes, or writes the file of a job that does.

A launcher holds no arrays, so this module does not import what trains.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from axon_dist.core.errors import LaunchError
from axon_dist.launch import LaunchPlan, attach, launch, launch_hosts, read_hosts
from axon_dist.train.jobs import SCHEDULERS, Job, check_job, submit_job
from axon_dist.train.jobs.job import PLACEHOLDER

from .values import check_output, write_output

_OF_JOBS = (
    *("nodes", "gpus", "name", "shared", "image", "accelerator", "hours"),
    *("efa", "out", "submit"),
)
"""Options of `axon launch` that need a scheduler."""


def launch_processes(arguments: argparse.Namespace) -> int:
    """Launches processes; the exit code is that of the rank that failed first."""
    options = {
        name: value for name, value in vars(arguments).items() if name not in ("verb", "began")
    }
    if options["command"][:1] == ["--"]:
        del options["command"][0]
    options["command"] = tuple(options["command"])
    job = {name: options.pop(name) for name in _OF_JOBS}
    chosen = {name: options.pop(name) for name in SCHEDULERS}
    named = {name: config for name, config in chosen.items() if config is not None}
    job = {name: value for name, value in job.items() if value is not None and value is not False}
    if named:
        _check_used(named, [*_changed(options), *job])
        return _write_job(named, job, options["command"])
    for name in job:
        raise LaunchError(
            f"got --{name} without a scheduler; give one of "
            f"{', '.join(f'--{other} CONFIG' for other in SCHEDULERS)}, or leave it out",
            code="no-scheduler",
        )
    return _launch_here(options)


def _changed(options: Mapping[str, Any]) -> list[str]:
    """Returns the options for the processes of this host that do not have their default."""
    plan = {field.name: field.default for field in dataclasses.fields(LaunchPlan)}
    # `log_dir` is None if it is not given; the folder is then named after the time.
    defaults: dict[str, object] = {**plan, "log_dir": None, "attached": False}
    return [
        name for name, value in options.items() if name != "command" and value != defaults.get(name)
    ]


def _check_used(named: Mapping[str, str], given: Sequence[str]) -> None:
    """Raises for an option that the job files of the schedulers do not use."""
    for scheduler in named:
        unused = SCHEDULERS[scheduler].unused
        for name in given:
            if name not in _OF_JOBS or name in unused:
                raise LaunchError(
                    f"got --{name.replace('_', '-')}, which has no effect on a job file of "
                    f"--{scheduler}; leave it out",
                    code="option-without-effect",
                )


def _launch_here(options: dict[str, Any]) -> int:
    """Starts the processes of this host, or launchers on other hosts."""
    wanted = options.pop("log_dir")
    is_attached = options.pop("attached")
    hosts = options.pop("hosts")
    file = options.pop("hostfile")
    if is_attached:
        attach()
    names = () if hosts is None and file is None else read_hosts(hosts, file)
    if names and (options["nnodes"] != 1 or options["node_rank"]):
        raise LaunchError(
            "got hosts together with --nnodes or --node-rank, which the hosts determine; leave "
            "--nnodes and --node-rank out",
            code="hosts-and-nnodes",
        )
    if names and (options["elastic"] or options["rejoin_after"] is not None):
        raise LaunchError(
            "got hosts together with --elastic or --rejoin-after, which only restart the "
            "processes of one host; leave them out, and give --max-restarts to start again on all "
            "hosts",
            code="hosts-and-elastic",
        )
    if names:
        options = {**options, "nnodes": len(names), "master_addr": names[0].rpartition("@")[2]}
    plan = LaunchPlan(**options)
    folder = wanted or _new_folder(time.strftime("runs/launch-%Y%m%d-%H%M%S"))
    plan = dataclasses.replace(plan, log_dir=folder)
    if not names:
        return launch(plan, _tell)
    share = plan.devices_per_process
    further = () if share is None else ("--devices-per-process", str(share))
    return launch_hosts(names, plan, further, _tell)


def _write_job(
    named: Mapping[str, str], options: Mapping[str, Any], overrides: tuple[str, ...]
) -> int:
    """Writes the job file of a scheduler, checks it, and submits it if requested."""
    if len(named) > 1:
        raise LaunchError(f"got {' and '.join(f'--{name}' for name in named)}; give one of them")
    ((name, path),) = named.items()
    for word in overrides:
        if word.startswith("-") or "=" not in word:
            raise LaunchError(
                f"got {word!r:.80} after the config; put all options first, and then only "
                "key.path=value arguments",
                code="option-after-config",
            )
    scheduler = SCHEDULERS[name]
    configs = importlib.import_module("axon_dist.train.config")
    config = configs.load_config(path, ("devices.emulate=null", *overrides))
    given = {key: value for key, value in options.items() if key not in ("out", "submit")}
    fields: dict[str, Any] = {"name": config.name, **given}
    job = Job(config=path, overrides=overrides, **fields)
    # Raise for a mesh that does not fit the devices now, not after the job has waited in a queue.
    config.mesh.resolve(job.nodes * job.gpus)
    file = options.get("out", Path(job.name + scheduler.suffix))
    check_output("--out", file)
    text = scheduler.write(job)
    write_output("--out", file, text)
    checked = check_job(scheduler, file)
    by = (
        f"checked by {' and '.join(checked)}" if checked else "it cannot be checked on this machine"
    )
    _tell(f"wrote {file}; {by}")
    if PLACEHOLDER in text:
        _tell(f"{PLACEHOLDER} is a placeholder: build an image from the Dockerfile, give --image")
    if "submit" in options:
        _tell(submit_job(scheduler, file))
    else:
        print(f"{' '.join(scheduler.submit)} {file}")
    return 0


def _new_folder(name: str) -> Path:
    """Makes a folder; appends a number to its name if another launch has made it."""
    for number in range(1, 1000):
        folder = Path(name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            break
        return folder
    # `launch` reports why the folder cannot be made.
    return Path(name)


def _tell(line: str) -> None:
    print(f"axon launch: {line}", file=sys.stderr, flush=True)
