"""Our steps against the same steps written by hand with `jax.jit` and `NamedSharding`.

    python -m benchmarks.step [--rows ddp zero2 fsdp "fsdp remat"] [--rounds 5]

The programs written by hand gather weights once and keep them whole until the backward pass has
used them, as zero2 does. fsdp frees them and gathers them again, so it is compared with a second
program that does the same: each block is under a `jax.checkpoint` that keeps all but gathered
weights. The rows named elastic are compared with our step without `deterministic="elastic"`. Prints
CPU-seconds per step (the least of the rounds, the figure to trust on a shared machine), the median
wall time, both relative to each program written by hand, and the collectives.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from axon_dist import ActivationCheckpointing, World, build_train_step, ddp, fsdp, zero
from axon_dist.inspect import Ledger, collectives
from axon_dist.models import Transformer, TransformerConfig, next_token_loss

from .timing import Timing, alternate

OURS, HAND, HAND_AGAIN = "axon_dist", "by hand", "by hand, gathered again"
HAND_PRODUCTS = "by hand, products kept"
ANY_BITS = "axon_dist, bits of its layout"
SMALL = 1024
"""Leaves with fewer elements stay whole in both programs."""


class Recomputed(nnx.Module):
    """A block whose forward pass is run again in the backward pass."""

    def __init__(self, block: nnx.Module, mesh: jax.sharding.Mesh):
        self.block = block

    def __call__(self, *args: Any) -> Any:
        return nnx.remat(type(self.block).__call__)(self.block, *args)


class Regathered(nnx.Module):
    """A block that frees its whole weights, and keeps all else for its backward pass."""

    keep: Callable[..., bool]

    def __init__(self, block: nnx.Module, mesh: jax.sharding.Mesh):
        self.keep = keep_all_but_gathered
        self.block = block
        self.whole = NamedSharding(mesh, PartitionSpec())

    def __call__(self, *args: Any) -> Any:
        graphdef, shards = nnx.split(self.block)

        def run(shards: Any, *args: Any) -> Any:
            weights = jax.lax.with_sharding_constraint(shards, self.whole)
            return nnx.merge(graphdef, weights, copy=True)(*args)

        return jax.checkpoint(run, policy=self.keep)(shards, *args)


class ProductsKept(Regathered):
    """A block that frees its whole weights, and keeps its products alone."""

    def __init__(self, block: nnx.Module, mesh: jax.sharding.Mesh):
        super().__init__(block, mesh)
        self.keep = jax.checkpoint_policies.dots_saveable


def keep_all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """The values that `Regathered` keeps: nothing else in a block has its own sharding."""
    return primitive.name != "sharding_constraint"


def whole(leaf: jax.Array, size: int) -> PartitionSpec:
    """Every device has the leaf."""
    return PartitionSpec()


def split(leaf: jax.Array, size: int) -> PartitionSpec:
    """Every device has a slice of the longest dim that the devices divide."""
    dims = [dim for dim in range(leaf.ndim) if leaf.shape[dim] % size == 0]
    if leaf.size < SMALL or not dims:
        return PartitionSpec()
    longest = max(dims, key=lambda dim: leaf.shape[dim])
    return PartitionSpec(*[None] * longest, "fsdp")


Change: TypeAlias = Callable[[nnx.Module, jax.sharding.Mesh], nnx.Module]
"""Replaces a block of the model."""

AS_IT_IS: MappingProxyType[str, Change] = MappingProxyType({HAND: lambda block, mesh: block})
"""The model unchanged: the compiler gathers a weight once."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A strategy, and what an expert writes in its place.

    Args:
        axis: of the mesh, over all devices.
        strategy: ours.
        spec: a leaf and the number of devices -> where it lies, by hand.
        plain_jax: the programs written in plain JAX, and how each changes a block.
        options: of `build_train_step`.
    """

    axis: str
    strategy: Callable[[], Any]
    spec: Callable[[jax.Array, int], PartitionSpec]
    plain_jax: MappingProxyType[str, Change] = AS_IT_IS
    options: MappingProxyType[str, Any] = MappingProxyType({})


ELASTIC = MappingProxyType({"deterministic": "elastic", "logical_shards": 8})
FSDP = Row(
    "fsdp",
    lambda: fsdp(min_elements=SMALL),
    split,
    MappingProxyType({**AS_IT_IS, HAND_AGAIN: Regathered, HAND_PRODUCTS: ProductsKept}),
)
ROWS = MappingProxyType(
    {
        "ddp": Row("dp", ddp, whole),
        "zero2": Row("fsdp", lambda: zero(2, "fsdp", min_elements=SMALL), split),
        "fsdp": FSDP,
        "fsdp remat": dataclasses.replace(
            FSDP,
            plain_jax=MappingProxyType({HAND: Recomputed}),
            options=MappingProxyType({"remat": ActivationCheckpointing()}),
        ),
        "ddp elastic": Row("dp", ddp, whole, MappingProxyType({}), ELASTIC),
        "fsdp elastic": dataclasses.replace(FSDP, plain_jax=MappingProxyType({}), options=ELASTIC),
    }
)
"""The rows that are measured, by name."""


def plain_step(
    model: Transformer,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    row: Row,
    change: Change,
):
    """The step of an expert without a library: one jitted function over sharded arrays."""
    model.blocks = nnx.List([change(block, mesh) for block in model.blocks])
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    place = lambda leaf: NamedSharding(mesh, row.spec(leaf, mesh.size))

    def loss_fn(params, batch):
        loss = next_token_loss(nnx.merge(graphdef, params, copy=True), batch)
        return loss.total / loss.weight

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    params = jax.tree.map(lambda x: jax.device_put(x, place(x), may_alias=False), params)
    places = jax.tree.map(place, params)
    opt_places = jax.tree.map(place, jax.eval_shape(optimizer.init, params))
    opt_state = jax.jit(optimizer.init, out_shardings=opt_places)(params)
    out = ((places, opt_places), NamedSharding(mesh, PartitionSpec()))
    return jax.jit(step, donate_argnums=0, out_shardings=out), (params, opt_state)


@dataclasses.dataclass
class Program:
    """A compiled step with its state.

    Args:
        step: (state, batch) -> (state, loss).
        state: the current state; each call advances it.
        batch: placed.
        ledger: the collectives of the compiled program.
        temporaries: bytes of a device in addition to the state and the batch.
    """

    step: Callable[[Any, Any], tuple[Any, jax.Array]]
    state: Any
    batch: Any
    ledger: Ledger
    temporaries: int

    def __call__(self) -> jax.Array:
        self.state, loss = self.step(self.state, self.batch)
        return loss


def programs_of(row: Row, devices: int) -> dict[str, Program]:
    """Ours and those by hand, each with a state of its own."""
    world = World.emulate(devices, f"{row.axis}={devices}")
    model = lambda: Transformer(TransformerConfig.preset("quickstart"), rngs=nnx.Rngs(0))
    optimizer = optax.adamw(1e-3)
    batch = {"tokens": np.random.default_rng(0).integers(0, 256, (16, 129)).astype(np.int32)}

    def program(step, state, placed, lowered):
        compiled = lowered.compile()
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        return Program(step, state, placed, collectives(compiled, world.mesh), temporaries)

    def ours(**options):
        strategy = row.strategy()
        step = build_train_step(model(), optimizer, next_token_loss, strategy, world, **options)

        def run(state, batch):
            state, metrics = step(state, batch)
            return state, metrics["loss"]

        return program(run, step.init(), step.place(batch), step.lower(batch))

    programs = {OURS: ours(**dict(row.options))}
    arrays = programs[OURS].batch.arrays
    for name, change in row.plain_jax.items():
        jitted, state = plain_step(model(), optimizer, world.mesh, row, change)
        programs[name] = program(jitted, state, arrays, jitted.lower(state, arrays))
    return programs if row.plain_jax else programs | {ANY_BITS: ours()}


def measure(name: str, devices: int, rounds: int, calls: int) -> tuple[Table, list[str]]:
    """Times the programs of a row side by side."""
    programs = programs_of(ROWS[name], devices)
    timings = alternate(dict(programs), rounds, calls)
    table = Table(title=f"step of {name}, {devices} emulated devices")
    table.add_column("program")
    for column in (
        "CPU-s/step (min)",
        "wall (median)",
        "collectives",
        "wire MB",
        "temporaries MB",
        "loss",
    ):
        table.add_column(column, justify="right")
    for label, program in programs.items():
        table.add_row(
            label,
            f"{timings[label].best_cpu:.3f}",
            f"{timings[label].median_wall:.3f}",
            f"{program.ledger.num_executions()}",
            f"{program.ledger.total_wire_bytes() / 1e6:.3f}",
            f"{program.temporaries / 1e6:.3f}",
            f"{float(program()):.5f}",
        )
    return table, [against(label, programs, timings) for label in programs if label != OURS]


def against(label: str, programs: dict[str, Program], timings: dict[str, Timing]) -> str:
    """The time of our step relative to one in plain JAX."""
    ours, hand = timings[OURS], timings[label]
    same = programs[OURS].ledger.by_kind() == programs[label].ledger.by_kind()
    return (
        f"to {label}: CPU-seconds {ours.best_cpu / hand.best_cpu:.3f}, "
        f"median wall {ours.median_wall / hand.median_wall:.3f}; collectives identical: {same}"
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--devices", type=int, default=8)
    args = parser.parse_args()
    World.emulate(args.devices)
    console = Console()
    for name in args.rows:
        table, ratios = measure(name, args.devices, args.rounds, args.calls)
        console.print(table)
        console.print("\n".join(ratios))


if __name__ == "__main__":
    main()
