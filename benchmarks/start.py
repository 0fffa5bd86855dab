"""The CPU-seconds of a start: building a step, its first state, and the first step.

    python benchmarks/start.py [--models mlp vit …] [--devices 1 8] [--repeat 3]
                               [--source FOLDER …] [--json FILE] [--no-step]

It is compared with the same in plain JAX on one device: the module is made eagerly, and its step
is one `jax.jit`. Each start runs in a process of its own. CPU-seconds are those of all threads, so
that other programs on the machine disturb them little. The share of `init` in making the module
eagerly is the figure to watch. Several `--source` measure several checkouts of the library in turn,
for a table of before and after: a busy machine then slows all of them. With `--repeat` the smallest
figure of each phase is taken. `--no-step` leaves the first step out. Importing is not counted, and
no compiled program is kept from another process.

The GPTs are split over the devices by FSDP, for eight copies of their states fit no small machine.
Of the 1.3B four of its 24 blocks run: all of them need 21 GB, and the others would share the
programs that make these four.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve()
PHASES = ("build", "init", "first step")


class Model(NamedTuple):
    """A model that is started.

    Args:
        make: makes it.
        loss: of it and a batch.
        batch: names, shapes and dtypes of what it is trained on.
        is_split: whether devices split its states by FSDP rather than hold a copy each.
    """

    make: Callable[[], Any]
    loss: Callable[..., Any]
    batch: dict[str, tuple[tuple[int, ...], str]]
    is_split: bool = False


def models() -> dict[str, Callable[[], Model]]:
    """The models by name, imported when one is asked for."""
    from flax import nnx

    from axon_dist.models import (
        ResNet,
        ResNetConfig,
        Transformer,
        TransformerConfig,
        ViT,
        ViTConfig,
        classification_loss,
        next_token_loss,
    )

    def language(
        length: int, is_split: bool = False, preset: str = "quickstart", **sizes: Any
    ) -> Model:
        config = TransformerConfig.preset(preset, **sizes)

        def make() -> nnx.Module:
            return Transformer(config, rngs=nnx.Rngs(0))

        return Model(make, next_token_loss, {"tokens": ((8, length), "int32")}, is_split)

    def images(make: Callable[[], nnx.Module], size: int) -> Model:
        batch = {"x": ((8, size, size, 3), "float32"), "y": ((8,), "int32")}
        return Model(make, classification_loss, batch)

    def mlp() -> Model:
        def make() -> nnx.Module:
            rngs, sizes = nnx.Rngs(0), (256, *(512,) * 8, 10)
            layers = [nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)]
            return nnx.Sequential(*(part for layer in layers for part in (layer, nnx.relu)))

        batch = {"x": ((8, 256), "float32"), "y": ((8,), "int32")}
        return Model(make, classification_loss, batch)

    return {
        "quickstart": lambda: language(65),
        "12x192": lambda: language(33, num_layers=12, width=192, num_heads=6, num_kv_heads=6),
        "mlp": mlp,
        "vit": lambda: images(
            lambda: ViT(
                ViTConfig(image_size=32, patch_size=4, num_classes=10, width=192, num_heads=3),
                rngs=nnx.Rngs(0),
            ),
            32,
        ),
        "resnet": lambda: images(
            lambda: ResNet(
                ResNetConfig(stage_sizes=(2, 2, 2, 2), block="basic", num_classes=10, stem="small"),
                rngs=nnx.Rngs(0),
            ),
            32,
        ),
        "gpt2": lambda: language(17, True, preset="gpt2"),
        "gpt-1.3b, 4 blocks": lambda: language(
            17, True, preset="gpt2", width=2048, num_layers=4, num_heads=16, ffn_width=8192
        ),
    }


def measure(name: str, devices: int, way: str, takes_step: bool = True) -> dict[str, float]:
    """The CPU-seconds of every phase of one start, in this process."""
    import jax
    import numpy as np
    import optax
    from flax import nnx

    from axon_dist import World, build_train_step, ddp, fsdp

    model = models()[name]()
    strategy, axis = (fsdp(), "fsdp") if model.is_split else (ddp(), "dp")
    world, optimizer = World.emulate(devices, f"{axis}={devices}"), optax.adamw(1e-3)
    # The backend is no part of either start.
    jax.block_until_ready(jax.numpy.zeros(3) + 1)
    batch = {key: np.ones(shape, dtype) for key, (shape, dtype) in model.batch.items()}
    seconds: dict[str, float] = {}

    def phase(name: str, run: Callable[[], Any]) -> Any:
        begin = time.process_time()
        result = run()
        jax.block_until_ready([x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)])
        seconds[name] = time.process_time() - begin
        return result

    if way == "ours":
        step = phase(
            "build", lambda: build_train_step(model.make, optimizer, model.loss, strategy, world)
        )
        state = phase("init", step.init)
        if takes_step:
            phase("first step", lambda: step(state, batch))
        return seconds
    graphdef, params, rest = phase("eager", lambda: nnx.split(model.make(), nnx.Param, ...))

    def loss_of(params: Any, rest: Any, batch: Any) -> tuple[Any, Any]:
        whole = nnx.merge(graphdef, params, rest, copy=True)
        loss = model.loss(whole, batch)
        loss = loss[0] if isinstance(loss, tuple) else loss
        value = loss.total / loss.weight if hasattr(loss, "total") else loss
        return value, nnx.split(whole, nnx.Param, ...)[2]

    @jax.jit
    def train_step(params: Any, rest: Any, moments: Any, batch: Any) -> Any:
        grads, rest = jax.grad(loss_of, has_aux=True)(params, rest, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), rest, moments

    moments = phase("init", lambda: optimizer.init(params))
    if takes_step:
        phase("first step", lambda: train_step(params, rest, moments, batch))
    return seconds


def started(
    name: str, devices: int, way: str, source: Path, takes_step: bool = True
) -> dict[str, float]:
    """Measures one start in a process of its own."""
    command = [sys.executable, str(HERE), "--one", name, str(devices), way, str(int(takes_step))]
    env = {**os.environ, "PYTHONPATH": str(source), "JAX_ENABLE_COMPILATION_CACHE": "0"}
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr[-3000:])
    return json.loads(run.stdout.splitlines()[-1])


def fastest(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The smallest figure of each phase."""
    return {phase: min(run[phase] for run in runs) for phase in runs[0]}


def rows(
    names: Sequence[str],
    devices: Sequence[int],
    sources: Sequence[Path],
    repeat: int,
    takes_step: bool,
) -> Iterator[dict[str, Any]]:
    """The figures of every model on every number of devices, by every checkout."""
    for name in names:
        for count in devices:
            plain: list[dict[str, float]] = []
            ours: dict[Path, list[dict[str, float]]] = {source: [] for source in sources}
            for _ in range(repeat):
                plain.append(started(name, 1, "plain", sources[0], takes_step))
                for source in sources:
                    ours[source].append(started(name, count, "ours", source, takes_step))
            for number, source in enumerate(sources):
                yield {
                    "model": name,
                    "devices": count,
                    "source": str(source),
                    "ours": fastest(ours[source]),
                    "plain": fastest(plain),
                    "share": sum(fastest(ours[source]).values())
                    / sum(fastest(ours[sources[0]]).values()),
                    "is_first": number == 0,
                }


def line(row: dict[str, Any]) -> str:
    """A row of the table, in Markdown."""
    ours, plain = row["ours"], row["plain"]
    name = row["model"] if row["is_first"] else f"{row['model']} ({row['source']})"
    cells = [
        name,
        str(row["devices"]),
        *(f"{ours[phase]:.1f}" if phase in ours else "-" for phase in PHASES),
        f"{sum(ours.values()):.1f}",
        f"{plain['eager']:.1f}",
        f"{sum(plain.values()):.1f}",
        f"{ours['init'] / plain['eager']:.2f}",
        f"{row['share']:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measures, and prints a table in Markdown."""
    if sys.argv[1:2] == ["--one"]:
        name, devices, way, takes_step = sys.argv[2:]
        print(json.dumps(measure(name, int(devices), way, takes_step == "1")))
        return
    names = [*models()]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--source", type=Path, nargs="+", default=[HERE.parent.parent])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-step", action="store_true", help="leave the first step out")
    args = parser.parse_args()
    heads = ["model", "devices", *PHASES, "all", "eager module", "plain start", "init / eager"]
    heads += ["all / all of the first source"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    sources = [source.resolve() for source in args.source]
    measured = []
    for row in rows(args.models, args.devices, sources, args.repeat, not args.no_step):
        measured.append(row)
        print(line(row), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
