"""The copies of a run's state in the memory of its hosts, and going on from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from axon_dist.checkpoint import HostCopies, HostCopy
from axon_dist.core.errors import ConfigError, DamagedCheckpointError
from axon_dist.launch import MEMORY
from axon_dist.step import PortableForm, TrainState

from ..config.build import Run
from ..config.schema import RunConfig
from .directory import AUTO


@dataclasses.dataclass(frozen=True)
class RunCopies:
    """The copies that a run makes of its state, in the form that a checkpoint has.

    Args:
        run: what is trained, with its loader.
        form: in which its states are kept.
        kept: where the copies are.
    """

    run: Run
    form: PortableForm
    kept: HostCopies

    def save(self, state: TrainState, number: int) -> None:
        """Keeps a state, and its place in the data; its arrays may be donated afterwards."""
        self.kept.save(number, self.form.of(state), {"data": self.run.loader.state()})

    def newest(self, tell: Callable[[str], None]) -> HostCopy | None:
        """The newest copy that is whole, or None.

        Args:
            tell: takes a sentence about one that is damaged.
        """
        try:
            return self.kept.newest(self.form.target)
        except DamagedCheckpointError as error:
            tell(str(error))
            return None


def open_copies(
    run: Run, form: PortableForm, env: Mapping[str, str], tell: Callable[[str], None]
) -> RunCopies | None:
    """Finds the memory that a run keeps its copies in; None where the config asks for none.

    Args:
        run: what is trained.
        form: in which its states are kept.
        env: the environment, in which the launcher says where.
        tell: takes a sentence when a copy could not be made.
    """
    if not run.config.checkpoint.memory_every:
        return None
    return RunCopies(run, form, HostCopies(Path(env[MEMORY]), tell))


def check_copies(config: RunConfig, env: Mapping[str, str], resume: str | None) -> None:
    """Raises where a config asks for copies that nobody would keep, or go on from.

    Args:
        config: a run as YAML describes it.
        env: the environment.
        resume: where the run goes on.

    Raises:
        ConfigError: saying what to do.
    """
    every = config.checkpoint.memory_every
    if not every:
        return
    folder = env.get(MEMORY)
    if folder is None:
        raise ConfigError(
            f"checkpoint.memory_every: got {every}, and nothing keeps copies in the memory of this "
            "host; start the run by axon launch --max-restarts 3 -- axon train ..., on a host that "
            f"has /dev/shm, set {MEMORY} to a folder in memory that outlives a process, or leave "
            "it at 0"
        )
    if not Path(folder).is_dir():
        raise ConfigError(f"{MEMORY} names {folder!r}, which is no folder; make it, or unset it")
    if resume != AUTO or config.run_dir is None:
        missing = "--resume auto" if resume != AUTO else "a run_dir, in which it goes on"
        raise ConfigError(
            f"checkpoint.memory_every: got {every}, and a run that starts again goes on from its "
            f"copies only with {missing}; add that. Where there is nothing to go on from, it "
            "begins at step 0"
        )
