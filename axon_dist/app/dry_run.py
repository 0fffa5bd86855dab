"""`dry_run`: what a run would do, compiled, and nothing written."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from flax.traverse_util import flatten_dict

from axon_dist.core.told import told
from axon_dist.core.tree import num_bytes
from axon_dist.core.words import byte_size, plural, si

from ..config import CONFIG, RunConfig
from .directory import check_directory
from .examine import read_program
from .runs import Run, build_run
from .summary import opening_lines


@dataclasses.dataclass(frozen=True)
class DryRun:
    """What `dry_run` finds.

    Args:
        config: every value of the config, defaults spelled out.
        opening: what the run says of itself at its start.
        program: what `read_program` reads from its compiled step.
        items: what a sample is counted in, and how many the whole run takes.
        ranks: of each process the ranks and the rows of a global batch that it brings.
        files: what would be written, and how large it gets where that is known.
    """

    config: dict[str, Any]
    opening: tuple[str, ...]
    program: dict[str, Any]
    items: tuple[str, int]
    ranks: tuple[str, ...]
    files: tuple[str, ...]

    def lines(self) -> list[str]:
        """For a terminal."""
        memory = self.program["memory"]
        width = max(map(len, memory))
        item, count = self.items
        chip = self.program["chip"]
        fits = f" of {byte_size(self.program['chip_bytes'])} of {chip}" if chip else ""
        return [
            *_told(self.config),
            "---",
            *self.opening,
            f"{si(count)} {item} in all",
            *self.ranks,
            "memory per device, read from the compiled step:",
            *(f"  {label:<{width}}  {byte_size(size):>8}" for label, size in memory.items()),
            f"  {'in all':<{width}}  {byte_size(sum(memory.values())):>8}{fits}",
            *self.program["warnings"],
            "would write:",
            *(f"  {file}" for file in self.files),
            "dry run: nothing was trained and nothing was written",
        ]


def _told(config: Mapping[str, Any]) -> list[str]:
    """The values of a config that are not those of one that says nothing, and how many are."""
    every, defaults = (
        flatten_dict(dict(one), sep=".", is_leaf=lambda _, value: not value)
        for one in (config, RunConfig().to_dict())
    )
    told = {key: x for key, x in every.items() if key not in defaults or defaults[key] != x}
    left = plural(len(every) - len(told), "further key")
    return [
        *(f"{key} = {yaml.safe_dump(x, default_flow_style=True).splitlines()[0]}"
          for key, x in told.items()),
        f"{left} as by default: axon config --full lists all",
    ]  # fmt: skip


@told(config=CONFIG)
def dry_run(config: RunConfig) -> DryRun:
    """Builds and compiles all that a run needs, and says what it would do; writes nothing.

    Args:
        config: a run as YAML describes it, checked.

    Returns:
        What was found.

    Raises:
        AxonDistError: whatever a run would be refused for before its first step.
    """
    check_directory(config)
    run = build_run(config)
    run.check_weights()
    train = config.train
    return DryRun(
        config=config.to_dict(),
        opening=tuple(opening_lines(run)),
        program=read_program(run),
        items=(run.item, train.steps * run.items_per_step),
        ranks=tuple(_shares(run)),
        files=tuple(_files(config, run.step.abstract_state)),
    )


def _shares(run: Run) -> list[str]:
    """How a global batch is divided."""
    axes, mesh = run.step.strategy.batch_axes, run.world.mesh
    rows, accumulate = run.config.train.global_batch, run.config.train.accumulate
    index, count = run.world.share_of_batch(axes)
    ranks = 1
    for axis in axes:
        ranks *= mesh.shape[axis]
    each = rows // ranks
    cut = f", in {plural(accumulate, 'microbatch')} of {each // accumulate}" * (accumulate > 1)
    return [
        f"each of {plural(ranks, 'batch rank')} ({', '.join(axes) or 'no axis'}) takes "
        f"{each} of {plural(rows, 'sample')} a step{cut}",
        f"this process brings share {index + 1} of {count}: {rows // count} samples a step",
    ]


def _files(config: RunConfig, state: object) -> list[str]:
    path = Path(config.run_dir or f"runs/{config.name}-<time>").expanduser()
    kept = config.checkpoint
    folder = Path(kept.dir).expanduser() if kept.dir else path / "checkpoints"
    size = num_bytes(state)
    when = f"every {kept.every} steps and at the end" if kept.every else "at the end"
    named = ("config.yaml", "metrics.jsonl", "program.json", "summary.json", "loss.png")
    return [
        *(os.fspath(path / name) for name in named),
        f"{folder}{os.sep}step_…: {when}, {byte_size(size)} each, of which "
        f"{plural(kept.keep + kept.best, 'stays', 'stay')}",
    ]
