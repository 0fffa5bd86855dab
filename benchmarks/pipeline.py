"""Pipelines: what bubbles cost, and our schedules against a GPipe written by hand.

    python -m benchmarks.pipeline [--stages 8] [--microbatches 8 64] [--rounds 3]

The model is a GPT of 8 layers, width 256, 4 heads, 128 tokens, vocabulary 512, two samples per
microbatch, float32, AdamW. Prints CPU-seconds per microbatch (the least of the rounds): a program
that computes in its bubbles needs more of them per microbatch when there are few. The GPipe is a
scan over ticks, differentiated by JAX, each block under `jax.checkpoint`, idle ticks skipped by
`lax.cond`; `joined` is the same with products as the library has them (`with_merged_batch_dims`).
`1f1b residuals` keeps what the backward pass needs instead of recomputing it. Under the table are
the ratios that matter, and what the halves of a backward pass cost together, measured on a stage
alone. Lines on the standard error say how far it is: with `--stages 4 --microbatches 8` it takes
three to four minutes on two cores, half of them for compiling, and 64 microbatches take eight
times as long per step as 8.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from axon_dist import World, build_train_step, ddp, pipelined
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.pipeline import MicrobatchData, StageProgram, Wire, with_merged_batch_dims
from axon_dist.pipeline.stage import StageOperands, StagePasses, pull_back

from .timing import alternate

SCHEDULES = (
    "1f1b",
    "1f1b residuals",
    "1f1b dots",
    "eager_1f1b",
    "zero_bubble_h1",
    "zero_bubble_h1 residuals",
)
HAND, JOINED, ALONE = "gpipe by hand", "gpipe by hand, joined", "one device"
LAYERS, TOKENS, ROWS = 8, 128, 2


def make_model() -> Transformer:
    """The model."""
    config = TransformerConfig(
        vocab_size=512, width=256, num_layers=LAYERS, num_heads=4, ffn_width=1024, max_length=128
    )
    return Transformer(config, rngs=nnx.Rngs(0))


def gpipe_by_hand(world: World, num_microbatches: int, joined: bool):
    """The step of an expert without a library; returns a jitted step and its state."""
    stages = world.mesh.shape["pp"]
    model = make_model()
    blocks = [nnx.split(block) for block in model.blocks]
    graphdef = blocks[0][0]
    per_stage = LAYERS // stages
    stack = lambda *leaves: jnp.stack(leaves).reshape(stages, per_stage, *leaves[0].shape)
    weights = jax.tree.map(stack, *(nnx.to_pure_dict(state) for _, state in blocks))
    model.blocks = nnx.List([])
    outer_graph, outer = nnx.split(model)
    params = {"blocks": weights, "outer": nnx.to_pure_dict(outer)}
    specs = {
        "blocks": jax.tree.map(lambda _: PartitionSpec("pp"), weights),
        "outer": jax.tree.map(lambda _: PartitionSpec(), params["outer"]),
    }
    put = lambda x, spec: jax.device_put(x, NamedSharding(world.mesh, spec))
    params = jax.tree.map(put, params, specs)
    optimizer = optax.adamw(1e-3)

    def plain(leaves, x):
        return nnx.merge(graphdef, leaves, copy=True)(x)

    block = jax.checkpoint(with_merged_batch_dims(plain) if joined else plain)

    def losses(params, tokens):
        rank = jax.lax.axis_index("pp")
        own = jax.tree.map(lambda w: w[0], params["blocks"])
        outside = nnx.merge(outer_graph, params["outer"], copy=True)

        def stage(x):
            return jax.lax.scan(lambda x, w: (block(w, x), None), x, own)[0]

        def tick(carry, t):
            x, total = carry
            m = jnp.clip(t - rank, 0, num_microbatches - 1)
            active = (t >= rank) & (t < rank + num_microbatches)
            rows = jax.lax.dynamic_index_in_dim(tokens, m, keepdims=False)
            x = jax.lax.cond(rank == 0, lambda: outside.embed(rows[:, :-1]), lambda: x)
            y = jax.lax.cond(active, stage, lambda x: x, x)
            at_end = active & (rank == stages - 1)
            loss = jax.lax.cond(at_end, lambda: head(outside, y, rows[:, 1:]), lambda: 0.0)
            ring = [(i, i + 1) for i in range(stages - 1)]
            return (jax.lax.ppermute(y, "pp", ring), total + loss), None

        start = jnp.zeros((ROWS, TOKENS, 256)), 0.0
        ticks = jnp.arange(num_microbatches + stages - 1)
        (_, total), _ = jax.lax.scan(tick, start, ticks)
        return jax.lax.psum(total, "pp") / num_microbatches

    mapped = jax.shard_map(
        losses,
        mesh=world.mesh,
        in_specs=(specs, PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, tokens):
        params, opt_state = state
        loss, grads = jax.value_and_grad(mapped)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, jax.jit(optimizer.init)(params))


def head(model: Transformer, x: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross-entropy of a microbatch."""
    logits = model.head(x)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def tokens_of(num_microbatches: int) -> np.ndarray:
    """A batch."""
    shape = (num_microbatches * ROWS, TOKENS + 1)
    return np.random.default_rng(0).integers(0, 512, shape).astype(np.int32)


def program(name: str, stages: int, count: int):
    """A function that takes one step, and the seconds that compiling it took."""
    batch = {"tokens": tokens_of(count)}
    started = time.perf_counter()
    if name in (HAND, JOINED):
        world = World.emulate(stages, f"pp={stages}")
        step, state = gpipe_by_hand(world, count, name == JOINED)
        data = batch["tokens"].reshape(count, ROWS, -1)
        run = lambda state: step(state, data)
    else:
        alone = name == ALONE
        world = World.emulate(1, "dp=1") if alone else World.emulate(stages, f"pp={stages}")
        schedule, *backward = name.split()
        kept = {"backward": backward[0]} if backward else {}
        strategy = ddp() if alone else pipelined(stages, count, schedule, **kept)
        # A module, whose arrays exist: compiling a factory's random draws takes longer than a step.
        built = build_train_step(
            make_model(), optax.adamw(1e-3), next_token_loss, strategy, world, accumulate=count
        )
        state, placed = built.init(), built.place(batch)
        run = lambda state: built(state, placed)
    kept = [jax.block_until_ready(run(state))[0]]
    seconds = time.perf_counter() - started
    print(f"M={count}, {name}: compiled and run once in {seconds:.0f} s", file=sys.stderr)

    def call():
        kept[0], result = run(kept[0])
        return jax.block_until_ready(result)

    return call, seconds


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    args = parser.parse_args()
    World.emulate(args.stages)
    names = [ALONE, HAND, JOINED, *args.schedules]
    table = Table(title=f"{args.stages} stages: CPU-seconds per microbatch, seconds to compile")
    table.add_column("program")
    for count in args.microbatches:
        table.add_column(f"M={count}", justify="right")
        table.add_column("compile", justify="right")
    cells: dict[str, list[str]] = {name: [] for name in names}
    seconds: dict[tuple[str, int], tuple[float, float]] = {}
    for count in args.microbatches:
        made = {name: program(name, args.stages, count) for name in names}
        print(f"M={count}: {args.rounds} rounds of steps", file=sys.stderr)
        timings = alternate({name: call for name, (call, _) in made.items()}, args.rounds, 1)
        for name in names:
            seconds[name, count] = timings[name].best_cpu / count, made[name][1]
            cells[name] += [f"{part:.4f}" for part in seconds[name, count]]
    for name, row in cells.items():
        table.add_row(name, *row)
    console = Console()
    console.print(table)
    console.print(ratios(seconds, names, args.microbatches))
    whole, halves = halves_of_a_backward_pass(args.rounds)
    console.print(f"backward pass of a stage {whole:.4f} s, I + W {halves / whole:.2f} of it")


def ratios(
    seconds: dict[tuple[str, int], tuple[float, float]], names: list[str], counts: list[int]
) -> Table:
    """The figures of the table, as ratios within the same run."""
    few, many = min(counts), max(counts)
    table = Table(title="ratios")
    table.add_column("program")
    for title in (f"M={few} / M={many}", f"/ {HAND}, M={few}", f"compile / {ALONE}, M={many}"):
        table.add_column(title, justify="right")
    for name in names:
        (cpu, _), (cpu_many, compile_many) = seconds[name, few], seconds[name, many]
        hand, alone = seconds[HAND, few][0], seconds[ALONE, many][1]
        values = (cpu / cpu_many, cpu / hand, compile_many / alone)
        table.add_row(name, *(f"{value:.2f}" for value in values))
    return table


def halves_of_a_backward_pass(rounds: int) -> tuple[float, float]:
    """CPU-seconds of the backward pass of a two-block stage, whole and as I and W, recomputing."""
    blocks = [nnx.split(block) for block in make_model().blocks[:2]]
    graphs = [graph for graph, _ in blocks]
    leaves, trees = zip(*(jax.tree.flatten(state) for _, state in blocks), strict=True)

    def middle(weights, rest, data, stage, wire):
        (x,) = wire.floats
        for graph, tree, own in zip(graphs, trees, weights, strict=True):
            x = nnx.merge(graph, jax.tree.unflatten(tree, own))(x)
        return Wire([x], [])

    stage = StageProgram((0,), 0, range(2), None, with_merged_batch_dims(middle), None, (), (), ())
    x = jnp.ones((ROWS, TOKENS, 256))
    at = StageOperands(
        list(map(list, leaves)), {}, MicrobatchData([], []), jnp.int32(0), Wire([x], [])
    )
    parts = StagePasses.of(stage, at, [x])
    whole = jax.jit(lambda at, seed: pull_back(stage, at)[1](seed))
    input_half = jax.jit(lambda at, seed: parts.input_gradient(at, parts.forward(at)[1], seed))
    weight_half = jax.jit(parts.weight_gradient)

    def halves():
        dx, held = input_half(at, [x])
        return dx, weight_half(at, held)

    timings = alternate({"whole": lambda: whole(at, [x]), "halves": halves}, 4 * rounds, 5)
    return timings["whole"].best_cpu, timings["halves"].best_cpu


if __name__ == "__main__":
    main()
