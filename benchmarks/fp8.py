"""How far fp8 trains from bf16: the same run twice, side by side.

    python -m benchmarks.fp8 [CONFIG] [key.path=value …] [--steps 400] [--json FILE]

Without a GPU the products are computed of numbers that are rounded to fp8, which is slow and has
the digits that a GPU's products have. Both runs see the same batches and begin with the same
parameters; what is compared is the mean loss of the last tenth of the steps.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Iterator, Sequence

import jax

from axon_dist.train.app.runs import build_loader
from axon_dist.train.app.steps import build_step, build_world
from axon_dist.train.config import RunConfig, load_config

QUICKSTART = pathlib.Path(__file__).parents[1] / "configs" / "quickstart.yaml"
ONE_DEVICE = ("devices.emulate=1", "mesh.dp=1")


def losses(config: RunConfig, steps: int) -> Iterator[float]:
    """The loss of every step of a run."""
    world = build_world(config)
    step = build_step(config, world)
    state, batches = step.init(), iter(build_loader(config, world, step.strategy.batch_axes))
    for _ in range(steps):
        state, metrics = step(state, next(batches))
        yield float(metrics["loss"])


def compare(config: str, overrides: Sequence[str], steps: int) -> dict[str, object]:
    """Trains in both, and compares the losses.

    Args:
        config: a YAML file.
        overrides: `key.path=value`.
        steps: of each run.

    Returns:
        The figures as plain data.
    """
    found: dict[str, list[float]] = {}
    for precision in ("bf16", "fp8"):
        run = load_config(config, [*overrides, f"precision={precision}", f"train.steps={steps}"])
        found[precision] = list(losses(run, steps))
    tail = max(steps // 10, 1)
    last = {name: sum(values[-tail:]) / tail for name, values in found.items()}
    return {
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "steps": steps,
        "first_loss": {name: values[0] for name, values in found.items()},
        "last_loss": last,
        "relative": last["fp8"] / last["bf16"] - 1,
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("config", nargs="?", default=str(QUICKSTART))
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    found = compare(args.config, args.overrides or ONE_DEVICE, args.steps)
    text = json.dumps(found, indent=1)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
