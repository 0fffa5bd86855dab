"""Measures one GPU: correctness first, then speed; unattended, in chunks that can be resumed.

    python -m benchmarks.gpu [--only NAME …] [--json FILE] [--tiny] [--again] [--list] [--markdown]

Every chunk runs in a process of its own, within eight minutes, and appends its figures to the JSON
file; one that is there already is not run again. Nothing in the file was not measured: a chunk that
fails or takes too long leaves its reason. Without a GPU it runs on what there is, which `--tiny`
makes a matter of seconds; every row names the device. `AXON_GPU_TINY=1` in the environment
makes the sizes of this module tiny, too, for programs that import them.

MFU counts the matrix products of forward and backward pass, 6 FLOPs per weight of a product and
token (the head is one, looking up embeddings is none) and attention over the positions that a
causal mask leaves, 6·L·T·D per token; recomputed work is not counted. It is of the chip's bfloat16
peak, in fp8 too.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from axon_dist import World, build_train_step, fsdp
from axon_dist.core.errors import ConfigError
from axon_dist.inspect import memory
from axon_dist.mesh.chips import machine_of
from axon_dist.models import Transformer, TransformerConfig, next_token_loss, num_params
from axon_dist.train.app import check_numerics, tiny, tune, verify
from axon_dist.train.config import RunConfig

from .timing import alternate

SECONDS = 460
"""The time limit of a chunk."""


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and the batches that are tried, largest first.

    Args:
        width: of the residual stream.
        layers: blocks.
        heads: of attention.
        length: positions of a sample.
        batches: samples per step; the first that fits by the compiler's count is taken.
        vocab: ids.
        remat: whether the plain step and that of torch recompute; ours recomputes what the memory
            asks.
    """

    width: int
    layers: int
    heads: int
    length: int
    batches: tuple[int, ...]
    vocab: int = 50304
    remat: bool = False

    def config(self) -> TransformerConfig:
        """A GPT-2 of this size."""
        return TransformerConfig(
            vocab_size=self.vocab,
            width=self.width,
            num_layers=self.layers,
            num_heads=self.heads,
            max_length=self.length,
            tied_head=True,
            norm="layer",
            positions="learned",
            gated=False,
            activation="gelu",
        )


_SIZES = {
    "124m": Size(768, 12, 12, 1024, (64, 32, 16)),
    "350m": Size(1024, 24, 16, 1024, (64, 32, 16)),
    "1.3b": Size(2048, 24, 16, 2048, (16, 8, 4), remat=True),
    # Slabs of an 8B: one and three layers with a small vocabulary differ by two layers.
    "8b-slab-1": Size(4096, 1, 32, 4096, (4, 2, 1), vocab=1024, remat=True),
    "8b-slab-3": Size(4096, 3, 32, 4096, (4, 2, 1), vocab=1024, remat=True),
}
TINY = Size(64, 2, 2, 32, (4,), vocab=256)
IS_TINY = os.environ.get("AXON_GPU_TINY", "") not in ("", "0")


def sizes(small: bool) -> dict[str, Size]:
    """The sizes by name.

    Args:
        small: models of seconds that recompute where those of their names do.
    """
    if not small:
        return _SIZES
    return {name: dataclasses.replace(TINY, remat=size.remat) for name, size in _SIZES.items()}


SIZES = sizes(IS_TINY)
PRECISIONS = ("bf16", "fp8")
VERIFIED = {
    "ddp": {"mesh": "dp=-1", "parallel": "ddp"},
    "fsdp": {"mesh": "fsdp=-1", "parallel": "fsdp"},
    "muon": {"mesh": "fsdp=-1", "parallel": "fsdp", "optimizer": {"name": "muon"}},
    "accumulated": {"mesh": "dp=-1", "parallel": "zero1", "train": {"accumulate": 2}},
    "bf16": {"mesh": "dp=-1", "parallel": "ddp", "precision": "bf16"},
    "fp8": {"mesh": "dp=-1", "parallel": "ddp", "precision": "fp8"},
}


def chunks(small: bool) -> dict[str, Callable[[], Mapping[str, Any]]]:
    """Everything there is to run, in order.

    Args:
        small: models of seconds, the same code.
    """
    found: dict[str, Callable[[], Mapping[str, Any]]] = {
        f"verify:{name}": functools.partial(verified, rows) for name, rows in VERIFIED.items()
    }
    found |= {"doctor": sentinels, "deterministic": functools.partial(twice, TINY)}
    for name, size in sizes(small).items():
        for precision in PRECISIONS:
            found[f"speed:{name}:{precision}"] = functools.partial(speed, size, precision)
        found[f"jit:{name}"] = functools.partial(plain_jit, size)
        found[f"torch:{name}"] = functools.partial(by_torch, size, small)
    for name in ("124m", "1.3b"):
        found[f"tune:{name}"] = functools.partial(tuned, sizes(small)[name])
    return found


def verified(changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The strategy of a config on the devices that there are, against one of them."""
    plain = {"model": {"preset": "quickstart"}, "train": {"global_batch": 16}, **changes}
    plain["train"] = {"global_batch": 16, **changes.get("train", {})}
    found = verify(tiny(RunConfig.from_dict(plain)), 2)
    worst = max((*found.metrics, *found.params), key=lambda row: row.relative)
    return {
        "passed": found.passed,
        "worst": worst.relative,
        "of": worst.what,
        "tolerance": found.tolerance,
    }


def sentinels() -> Mapping[str, Any]:
    """The operations that compilers have got wrong, which needs four devices."""
    if jax.device_count() < 4:
        return {"skipped": f"needs 4 devices, and there are {jax.device_count()}"}
    found = check_numerics(jax.devices()[: jax.device_count() // 2 * 2])
    return {"passed": all(one.is_right for one in found), "gradients": len(found)}


def twice(size: Size) -> Mapping[str, Any]:
    """Two runs of a few steps with the same bits."""

    def run() -> list[bytes]:
        step, batch = built(size, "bf16", size.batches[-1] * jax.device_count(), deterministic=True)
        state = step.init()
        for _ in range(3):
            state, _ = step(state, batch)
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.params)]

    return {"passed": run() == run()}


def built(size: Size, precision: str, samples: int, **options: Any) -> tuple[Any, dict]:
    """The step of a size on all devices that there are, and a batch."""
    tokens = np.random.default_rng(0).integers(0, size.vocab, (samples, size.length + 1))
    batch = {"tokens": tokens.astype(np.int32)}
    step = build_train_step(
        lambda: Transformer(size.config(), rngs=nnx.Rngs(0)),
        optax.adamw(3e-4),
        next_token_loss,
        fsdp(),
        World.init("fsdp=-1"),
        clip_norm=1.0,
        precision=precision,
        batch=batch,
        **options,
    )
    return step, batch


def speed(size: Size, precision: str) -> Mapping[str, Any]:
    """Tokens per second, MFU, and the peak of memory, measured and as the compiler counts it."""
    samples, step, compiled, batch = fitting(size, precision)
    placed, held = step.place(batch), [step.init()]

    def run() -> Any:
        held[0], metrics = step(held[0], placed)
        return metrics["loss"]

    figures = timed(size, samples, run)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        **figures,
        "estimated_peak_bytes": memory(compiled).peak,
        "measured_peak_bytes": stats.get("peak_bytes_in_use"),
    }


def plain_jit(size: Size) -> Mapping[str, Any]:
    """The same model, optimizer and batch in plain `jax.jit` on one device, without the library."""
    if jax.device_count() > 1:
        return {"skipped": f"is for one device, and there are {jax.device_count()}"}
    samples, _, _, batch = fitting(size, "bf16")
    jitted, held = by_jit(size)

    def run() -> Any:
        nonlocal held
        *held, loss = jitted(*held, batch)
        return loss

    return timed(size, samples, run)


def timed(size: Size, samples: int, run: Callable[[], Any]) -> dict[str, Any]:
    """The figures of a step that is called again and again."""
    timing = alternate({"": run}, rounds=5, calls=4)[""]
    rate = samples * size.length / timing.median_wall
    return {
        "samples": samples,
        "length": size.length,
        "params": num_params(size.config()),
        "milliseconds": 1e3 * timing.median_wall,
        "fastest_milliseconds": 1e3 * min(timing.wall),
        "tokens_per_second": rate,
        "mfu": mfu(size, rate),
    }


def fitting(size: Size, precision: str) -> tuple[int, Any, Any, dict]:
    """The largest batch of a size that fits the memory of the device."""
    stats = jax.devices()[0].memory_stats() or {}
    limit = 0.9 * stats.get("bytes_limit", float("inf"))
    for samples in size.batches:
        try:
            step, batch = built(size, precision, samples * jax.device_count())
        except ConfigError:  # Not even with every block recomputed.
            continue
        compiled = step.lower(batch).compile()
        if memory(compiled).peak <= limit:
            return samples * jax.device_count(), step, compiled, batch
    raise MemoryError(f"not even {size.batches[-1]} samples fit {limit / 2**30:.0f} GiB")


def by_jit(size: Size) -> tuple[Any, list[Any]]:
    """One plain jitted step, and its first parameters and state."""
    config = dataclasses.replace(size.config(), dtype="bfloat16")
    graph, params = nnx.split(Transformer(config, rngs=nnx.Rngs(0)))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))

    def loss_of(params: Any, batch: Any) -> Any:
        found = next_token_loss(nnx.merge(graph, params, copy=True), batch)
        return found.total / found.weight

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        run = jax.checkpoint(loss_of) if size.remat else loss_of
        loss, grads = jax.value_and_grad(run)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = nnx.to_pure_dict(params)
    return jax.jit(step, donate_argnums=(0, 1)), [params, jax.jit(optimizer.init)(params)]


def mfu(size: Size, tokens_per_second: float) -> float | None:
    """The part of the chip's bfloat16 peak; None for a chip that is not in the table."""
    machine = machine_of(World.init("fsdp=-1").mesh)
    if machine is None or jax.default_backend() == "cpu":
        return None
    return flops_per_token(size) * tokens_per_second / (machine.flops * jax.device_count())


def flops_per_token(size: Size) -> float:
    """Counts the steps that the module's docstring lists.

    Example:
        >>> round(flops_per_token(SIZES["124m"]) / 1e6)
        798
    """
    config = size.config()
    # The table of the tied head is a product; that of the positions is only looked up.
    weights = num_params(config) - config.max_length * config.width
    return 6.0 * weights + 6.0 * size.layers * size.length * size.width


def by_torch(size: Size, small: bool = False) -> Mapping[str, Any]:
    """The same sizes in `torch.compile` on a GPU; small ones on a CPU, too."""
    from . import gpu_torch

    if (why := gpu_torch.missing(needs_gpu=not small)) is not None:
        return {"skipped": why}
    found = gpu_torch.measure(size)
    return {**found, "mfu": mfu(size, found["tokens_per_second"])}


def tuned(size: Size) -> Mapping[str, Any]:
    """The table of `axon tune` for a size."""
    model = dataclasses.asdict(size.config())
    plain = {
        "mesh": "fsdp=-1",
        "parallel": "fsdp",
        "precision": "bf16",
        "model": {name: value for name, value in model.items() if value is not None},
        "data": {"sequence_length": size.length},
        "train": {"global_batch": size.batches[-1] * jax.device_count(), "clip_norm": 1.0},
    }
    # Bytes, whose vocabulary any text has.
    plain["model"]["vocab_size"] = 256
    return tune(RunConfig.from_dict(plain), rounds=3, calls=2).to_dict()


def versions() -> dict[str, Any]:
    """Where a row was measured."""
    device = jax.devices()[0]
    return {
        "jax": jax.__version__,
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "platform_version": " ".join(device.client.platform_version.split()),
    }


def run_here(name: str, small: bool) -> dict[str, Any]:
    """Runs one chunk in this process."""
    begun = time.perf_counter()
    figures = chunks(small)[name]()
    seconds = time.perf_counter() - begun
    return {"name": name, "tiny": small, **versions(), "seconds": seconds, "figures": figures}


def run_in_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs one chunk in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--here", name]
    command += ["--tiny"] if args.tiny else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.seconds)
    except subprocess.TimeoutExpired:
        return {"name": name, "tiny": args.tiny, "failure": f"took more than {args.seconds} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return {"name": name, "tiny": args.tiny, "failure": said[:400]}
    return json.loads(lines[-1])


def known(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a file of results; none where there is no file."""
    return json.loads(path.read_text()) if path.exists() else []


def markdown(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The rows of models as a table, with where they were measured."""
    yield "| chunk | device | jax | tokens/s | MFU | est. peak GiB | measured peak GiB |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        figures = row.get("figures", {})
        rates = figures.get("tokens_per_second")
        if row.get("tiny") or rates is None:
            continue
        sizes = (figures.get("estimated_peak_bytes"), figures.get("measured_peak_bytes"))
        peaks = ["-" if size is None else f"{size / 2**30:.2f}" for size in sizes]
        share = "-" if figures["mfu"] is None else f"{figures['mfu']:.1%}"
        cells = [row["name"], row["device"], row["jax"], f"{rates:,.0f}", share, *peaks]
        yield "| " + " | ".join(cells) + " |"


def main() -> None:
    """Runs what is asked for and not yet known."""
    args = parse()
    if args.here:
        print(json.dumps(run_here(args.here, args.tiny)))
        return
    if args.markdown:
        print("\n".join(markdown(known(args.json))))
        return
    names = [n for n in chunks(args.tiny) if not args.only or any(o in n for o in args.only)]
    if args.list:
        print("\n".join(names))
        return
    rows = known(args.json)
    for name in names:
        old = [r for r in rows if r["name"] == name and r["tiny"] == args.tiny]
        if any("figures" in row for row in old) and not args.again:
            continue
        row = run_in_process(name, args)
        rows = [other for other in rows if other not in old] + [row]
        # Written aside first: a process that ends here leaves the rows of before.
        aside = args.json.with_suffix(".new")
        aside.write_text(json.dumps(rows, indent=1) + "\n")
        os.replace(aside, args.json)
        print(name, row.get("failure") or row["figures"], flush=True)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="chunks whose names contain one")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("gpu.json"))
    parser.add_argument("--seconds", type=int, default=SECONDS, help="what a chunk may take")
    parser.add_argument(
        "--tiny", action="store_true", default=IS_TINY, help="the same code on models of seconds"
    )
    parser.add_argument("--again", action="store_true", help="what is in the file, too")
    parser.add_argument("--list", action="store_true", help="the names of the chunks")
    parser.add_argument("--markdown", action="store_true", help="the file as a table")
    parser.add_argument("--here", metavar="NAME", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
