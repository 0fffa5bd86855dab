"""Writes a job as a SkyPilot task, for `sky jobs launch`."""

from __future__ import annotations

import importlib
import json

from ...core.errors import LaunchError
from ...core.plain_yaml import sections_of
from .job import PORT, REQUEUED, RESTARTS, Job, commented


def task(job: Job) -> str:
    """Returns the YAML file of the task: a launcher on each node starts one process per GPU."""
    interrupted, lost = REQUEUED
    settings = "\n".join(commented(job.settings(), "  ", '{name}: "{value}"'))
    return f"""\
# {job.nodes} nodes with {job.gpus} GPUs each, one process per GPU:
#
#   sky jobs launch FILE
name: {job.name}
num_nodes: {job.nodes}
resources:
  accelerators: {job.accelerator}:{job.gpus}
  image_id: {json.dumps("docker:" + job.image)}
  job_recovery:
    # {interrupted}: a signal ended the run and its state is saved. {lost}: a process was lost.
    # Any other code, such as 2 for a mistake in the config, ends the job.
    recover_on_exit_codes: [{interrupted}, {lost}]
    max_restarts_on_errors: {RESTARTS}
workdir: .
file_mounts:
  # A bucket that outlives the nodes, for the run and for compiled programs.
  {job.shared}:
    name: {job.name}-shared
    mode: MOUNT
envs:
{settings}
run: |
  axon launch -n {job.gpus} --nnodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK" \\
    --master-addr "$(head -n 1 <<< "$SKYPILOT_NODE_IPS")" --master-port {PORT} -- \\
    {job.shell_command}
"""


def check(text: str) -> str | None:
    """Checks a task with SkyPilot's schemas, if SkyPilot and `jsonschema` are installed.

    Returns:
        A description of the check; None if they are not installed.

    Raises:
        LaunchError: when the task does not match a schema; it has the schema's message.
    """
    try:
        jsonschema = importlib.import_module("jsonschema")
        schemas = importlib.import_module("sky.utils.schemas")
    except ImportError:
        return None
    data = sections_of(text, "the task")
    try:
        jsonschema.validate(data, schemas.get_task_schema())
        jsonschema.validate(data["resources"], schemas.get_resources_schema())
        for mount in data["file_mounts"].values():
            jsonschema.validate(mount, schemas.get_storage_schema())
    except jsonschema.ValidationError as error:
        raise LaunchError(
            f"SkyPilot rejects the task: {error.message}", code="job-rejected"
        ) from error
    return "the schemas of SkyPilot"
