"""`Job`: describes a run on many nodes, which each scheduler writes as a job file.

It defines the parts common to all schedulers: the command, the environment with a reason for each
setting, and the meaning of exit codes.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Sequence

from ...core.arguments import check_fields
from ...core.errors import LaunchError
from ...launch.local import INTERRUPTED, USER_ERROR
from ...launch.watchdog import EXIT_PEER_LOST

PORT = 29500
"""The port on which process 0 listens; job files open it."""

RESTARTS = 10
"""The maximum number of restarts after a process was lost; ends by a signal do not count."""

SAVE_SECONDS = 120
"""Seconds between SIGTERM and the end of a job, in which a step ends and a checkpoint is saved."""

LAST_SECONDS = 1800
"""Seconds that ranks may run after the first rank ended, for example to write a checkpoint."""

REQUEUED = (INTERRUPTED, EXIT_PEER_LOST)
"""Exit codes after which a job restarts."""

FINAL = USER_ERROR
"""The exit code after which a job must not restart."""

_MOST_NODES, _MOST_GPUS = 2**16, 64
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?")
"""A DNS label, as Kubernetes requires; short, because JobSet appends job and pod names."""


PLACEHOLDER = "registry.example.com/axon:latest"
"""The image name in a job file that the user must replace."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """An environment variable of all processes of a job.

    Args:
        name: the name of the variable.
        value: the value of the variable.
        reason: a comment for the job file.
    """

    name: str
    value: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A run on many nodes.

    Args:
        config: the path of the run's config on the nodes.
        overrides: `key.path=value` arguments for `axon train`.
        name: the name of the job: lower-case letters, digits and dashes, starting with a letter.
        nodes: the number of nodes.
        gpus: GPUs per node.
        shared: a folder on all nodes, for the run and compiled programs.
        image: the container image, if the scheduler runs containers.
        efa: whether nodes are connected by Elastic Fabric Adapters, as on AWS.
        accelerator: the name of the GPU, if the scheduler needs it.
        hours: the time limit, if the scheduler needs it.

    Raises:
        LaunchError: for invalid fields.
    """

    config: str
    overrides: tuple[str, ...] = ()
    name: str = "axon"
    nodes: int = 1
    gpus: int = 8
    shared: str = "/shared"
    image: str = PLACEHOLDER
    efa: bool = False
    accelerator: str = "H100"
    hours: int = 24

    def __post_init__(self) -> None:
        check_fields(self)
        self.validate()

    def validate(self) -> None:
        """Raises `LaunchError` for a size, a name or a folder that no scheduler accepts."""
        if not (1 <= self.nodes <= _MOST_NODES and 1 <= self.gpus <= _MOST_GPUS and self.hours > 0):
            raise LaunchError(
                f"got {self.nodes} nodes with {self.gpus} GPUs for {self.hours} hours; a job has 1 "
                f"to {_MOST_NODES} nodes of 1 to {_MOST_GPUS} GPUs and lasts at least an hour"
            )
        if _NAME.fullmatch(self.name) is None:
            raise LaunchError(
                f"a job cannot be called {self.name!r:.80}; give --name at most 42 lower-case "
                "letters, digits and dashes, starting with a letter",
                code="job-name",
            )
        if not self.shared.startswith("/") or re.search(r"[\s'\"$\\]", self.shared):
            raise LaunchError(
                f"the shared folder {self.shared!r:.80} must be an absolute path without spaces "
                "and quotes, which all nodes can access; give it with --shared",
                code="shared-folder",
            )
        for text in (self.config, self.image, self.accelerator, *self.overrides):
            if re.search(r"[\n\r\0]", text) or not text:
                raise LaunchError(
                    f"{text!r:.80} cannot be written into a job file; it must be one line of text",
                    code="job-text",
                )

    @property
    def run_dir(self) -> str:
        """The folder of the run; the same at each start, so that `--resume auto` finds it."""
        return f"{self.shared.rstrip('/')}/runs/{self.name}"

    @property
    def command(self) -> tuple[str, ...]:
        """The command of every process."""
        named = [word.partition("=")[0] for word in self.overrides]
        # A config for emulated devices would otherwise leave the GPUs idle.
        real = [] if "devices.emulate" in named else ["devices.emulate=null"]
        run_dir = [] if "run_dir" in named else [f"run_dir={self.run_dir}"]
        return ("axon", "train", self.config, *real, *self.overrides, *run_dir, "--resume", "auto")

    @property
    def shell_command(self) -> str:
        """The command, quoted for a shell."""
        return shlex.join(self.command)

    def settings(self) -> tuple[Setting, ...]:
        """The environment of every process."""
        cache = f"{self.shared.rstrip('/')}/compile-cache"
        made = [
            Setting(
                "JAX_COMPILATION_CACHE_DIR",
                cache,
                "A restart loads the program that the first start compiled.",
            ),
            Setting(
                "XLA_PYTHON_CLIENT_MEM_FRACTION",
                "0.90",
                "XLA takes 75% by default; NCCL and CUDA need the last tenth.",
            ),
            Setting(
                "NCCL_DEBUG",
                "WARN",
                "Network errors appear in the log with host and device.",
            ),
        ]
        if self.nodes > 1:
            made.append(
                Setting(
                    "NCCL_SOCKET_IFNAME",
                    "^lo,docker",
                    "Other nodes cannot reach the address of a container engine's bridge.",
                )
            )
        if self.nodes > 1 and self.efa:
            made += [
                Setting("FI_PROVIDER", "efa", "libfabric would also take TCP, which is slower."),
                Setting(
                    "FI_EFA_USE_HUGE_PAGE",
                    "0",
                    "Data loaders fork, and a fork fails if huge pages run out.",
                ),
            ]
        return tuple(made)


def commented(settings: Sequence[Setting], indent: str, line: str) -> list[str]:
    """Formats settings as lines of a file, each below a comment with its reason.

    Args:
        settings: the variables.
        indent: the prefix of every line.
        line: a format string with `name` and `value`.

    Example:
        >>> commented([Setting("A", "1", "Because.")], "  ", "export {name}={value}")
        ['  # Because.', '  export A=1']
    """
    lines: list[str] = []
    for setting in settings:
        lines.append(f"{indent}# {setting.reason}")
        lines.append(indent + line.format(name=setting.name, value=setting.value))
    return lines
