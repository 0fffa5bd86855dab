"""`LoopOptions`: how long a run is, and what it does how often."""

from __future__ import annotations

import dataclasses

import numpy as np

from axon_dist.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How long a loop runs and how often it tells.

    Args:
        num_steps: the step to stop at, counted from the first of the state.
        log_every: steps averaged into one record.
        eval_every: steps between validations; 0 validates only at the end. More than 0 needs a
            `validation` of the trainer.
        save_every: steps between saves; 0 saves only at the end. More than 0 needs a `save` of the
            trainer.
        copy_every: steps between copies; 0 makes none. More than 0 needs a `copy` of the trainer.
        items_per_step: items in a global batch; None leaves the throughput out.
        item: what they are; utilization is that of tokens.
        peak_flops: FLOP/s of one device at best, to measure utilization against; None leaves it
            out.
        max_rollbacks: how often a run goes back to a checkpoint, where the step's `nonfinite` says
            so; after that it stops.
        profile_at: the first step that is traced, counted from 1; 0 traces none.
        profile_steps: how many are traced.
    """

    num_steps: int
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 0
    copy_every: int = 0
    items_per_step: int | None = None
    item: str = "tokens"
    peak_flops: float | None = None
    max_rollbacks: int = 3
    profile_at: int = 0
    profile_steps: int = 3

    def validate(self) -> None:
        """Raises `ConfigError` unless the counts are possible."""
        every = ("log_every", "eval_every", "save_every", "copy_every")
        for name in ("num_steps", *every, "max_rollbacks"):
            count = getattr(self, name)
            if not isinstance(count, (int, np.integer)) or isinstance(count, bool):
                raise ConfigError(f"{name}={count!r} is no whole number; give one, such as 100")
        if (
            min(self.num_steps, self.log_every) < 1
            or min(self.eval_every, self.save_every, self.copy_every) < 0
        ):
            raise ConfigError(
                f"got num_steps={self.num_steps}, log_every={self.log_every}, "
                f"eval_every={self.eval_every}, save_every={self.save_every} and "
                f"copy_every={self.copy_every}; the first two must be at least 1, the others at "
                "least 0"
            )
        if self.profile_at < 0 or self.profile_steps < 1:
            raise ConfigError(
                f"got profile_at={self.profile_at} and profile_steps={self.profile_steps}; trace "
                "from a step of at least 0, and at least 1 of them"
            )
        if self.max_rollbacks < 1:
            raise ConfigError(f"max_rollbacks={self.max_rollbacks} must be at least 1; raise it")
        if self.peak_flops is not None and (self.items_per_step is None or self.item != "tokens"):
            raise ConfigError(
                f"peak_flops={self.peak_flops} needs items_per_step in tokens to measure "
                f"utilization, and got {self.items_per_step} {self.item}; set it"
            )
