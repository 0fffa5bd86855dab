"""The rankings of `axon plan`, pinned: estimators may change them, a move of code may not.

python -m tests.repo.plan_ranks            # says for which configs the plans differ
python -m tests.repo.plan_ranks --write    # pins what there is now, and says what has changed
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping

from axon_dist.planner import parse_cluster
from axon_dist.train.app import plan_config
from axon_dist.train.app.config_plans import TracedPlan
from axon_dist.train.config import load_config
from tests.repo.digests import run

ROOT = pathlib.Path(__file__).parents[2]
PINS = pathlib.Path(__file__).with_name("plan_ranks.json")
FLOAT32 = ("precision=float32", "model.num_layers=2")
"""Which attention a GPU runs in a narrow dtype may be asked of the CUDA that is installed."""
FEW_LAYERS = ("model.num_layers=2",)

CONFIGS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "diloco h100:2x4": ("diloco", "h100:2x4", FLOAT32),
    "fsdp8 v5p:2x2x2": ("fsdp8", "v5p:2x2x2", FEW_LAYERS),
    "hsdp h100:2x8": ("hsdp", "h100:2x8", FLOAT32),
    "lora_fsdp8 h100:8": ("lora_fsdp8", "h100:8", FLOAT32),
    "pp4 v5p:2x2x1": ("pp4", "v5p:2x2x1", ("model.num_layers=4",)),
    "quickstart h100:8": ("quickstart", "h100:8", ("precision=float32",)),
    "tp4_sp h100:4": ("tp4_sp", "h100:4", FLOAT32),
    "zero2 a100-80:2": ("zero2", "a100-80:2", FLOAT32),
}
"""By name: a file of configs/, a target, and values in place of the file's."""
SMALLEST = "zero2 a100-80:2"
"""The row of which the default run of the tests makes the simplest plans."""


def line_of(plan: TracedPlan) -> str:
    """The name of a plan, its mesh and microbatches, and the bytes that a device holds at most."""
    one = plan.candidate
    remat = " remat" if one.remat else ""
    return f"{one.name} {one.mesh} x{one.num_microbatches}{remat}: {plan.reading.peak:.0f}"


def ranks(name: str) -> list[str]:
    """The plans of a row of `CONFIGS`, best first."""
    file, target, overrides = CONFIGS[name]
    config = load_config(ROOT / "configs" / f"{file}.yaml", [*overrides])
    return [line_of(plan) for plan in plan_config(config, *parse_cluster(target)).plans]


def all_ranks() -> dict[str, list[str]]:
    """The plans of all configs."""
    return {name: ranks(name) for name in CONFIGS}


if __name__ == "__main__":
    sys.exit(run(PINS, all_ranks, "tests.repo.plan_ranks"))
