"""The compiled program of a pipeline computes and keeps its table's work, and no more."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, pipelined
from axon_dist.inspect import flops
from axon_dist.inspect.computations import visits
from axon_dist.inspect.flops import CostModel
from axon_dist.inspect.parse import as_module, origin
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.schedule import Phase, peak_live

ROWS, TOKENS, WIDTH, FFN, VOCABULARY = 2, 8, 16, 32, 48
LANE = re.compile(r"/body/\w+/([EFVBIWG])/cond$")


def make(num_layers, logits="whole"):
    config = TransformerConfig(
        vocab_size=VOCABULARY, width=WIDTH, num_layers=num_layers, num_heads=2, ffn_width=FFN,
        max_length=8, tied_head=False, logits=logits,
    )  # fmt: skip
    return Transformer(config, rngs=nnx.Rngs(0))


@functools.cache
def build(name, size, count, backward="recompute", split=False):
    """The table, and the compiled step of a model with one block per stage."""
    strategy = pipelined(size, count, name, backward=backward, split_vocabulary=split)
    world = World.emulate(size, f"pp={size}")
    layers = strategy.pipeline.schedule.num_stages
    model = functools.partial(make, layers, "chunked" if split else "whole")
    step = build_train_step(model, optax.sgd(0.1), next_token_loss, strategy, world)
    tokens = jax.ShapeDtypeStruct((ROWS * count, TOKENS + 1), jnp.int32)
    compiled = step.lower({"tokens": tokens}).compile()
    return strategy.pipeline.schedule, compiled


def lanes(compiled):
    """Per phase, the costs of the branches of its conditional in the loop over ticks."""
    module, found = as_module(compiled), {}
    costs = CostModel(module)
    for visit in visits(module):
        for instruction in visit.computation.instructions:
            name, _ = origin(instruction.attributes, module.sources)
            lane = instruction.opcode == "conditional" and LANE.search(name)
            if lane and not visit.in_conditional:
                assert lane.group(1) not in found
                found[lane.group(1)] = [costs.computation(c) for c in module.called(instruction)]
    return found


def work_of(schedule, compiled, keeps):
    """Matrix operations of all devices in one step, each branch as often as the table takes it."""
    branches, total, last = lanes(compiled), 0, schedule.num_stages - 1
    for action, device, *_ in schedule.placed():
        chunk = schedule.placement[: action.stage].count(device)
        cost = branches[str(action.phase)][1 + chunk]
        is_left = action.phase is Phase.F and action.stage == last and not keeps
        total += 0 if is_left else cost.high if action.stage == last else cost.low
    return total


def operations(function, *args):
    return flops(jax.jit(function).lower(*args).compile()).high


@functools.cache
def on_one_device(num_layers):
    """Matrix operations of one microbatch: forward and backward of all, forward of a block."""
    graph, params, buffers = nnx.split(make(num_layers), nnx.Param, ...)
    tokens = jax.ShapeDtypeStruct((ROWS, TOKENS + 1), jnp.int32)
    total = lambda p, t: next_token_loss(nnx.merge(graph, p, buffers), {"tokens": t}).total
    block_graph, block = nnx.split(make(1).blocks[0])
    x = jax.ShapeDtypeStruct((ROWS, TOKENS, WIDTH), jnp.float32)
    forward = operations(lambda p, x: nnx.merge(block_graph, p)(x), block, x)
    return operations(jax.value_and_grad(total), params, tokens), forward


CASES = [
    ("1f1b", 4, 8, "recompute"),
    ("zero_bubble_h1", 4, 8, "recompute"),
    *(
        pytest.param(name, size, count, backward, marks=pytest.mark.full)
        for name, size, count, backward in [
            ("gpipe", 4, 8, "recompute"),
            ("eager_1f1b", 8, 32, "recompute"),
            ("1f1b", 8, 8, "recompute"),
            ("interleaved_1f1b", 4, 8, "recompute"),
            ("zero_bubble_h2", 4, 8, "recompute"),
            ("zero_bubble_v", 4, 8, "recompute"),
            ("1f1b", 4, 8, "residuals"),
            ("interleaved_1f1b", 4, 8, "residuals"),
            ("zero_bubble_h1", 4, 8, "residuals"),
        ]
    ),
]


@pytest.mark.full
@pytest.mark.sample("zero_bubble_h1-4-8-recompute")
@pytest.mark.parametrize(("name", "size", "count", "backward"), CASES)
def test_nothing_is_computed_but_the_model_and_its_recomputation(name, size, count, backward):
    schedule, compiled = build(name, size, count, backward)
    assert flops(compiled).low == 0, "there is work outside the branches of the table"
    model, block = on_one_device(schedule.num_stages)
    keeps = backward == "residuals"
    # The last stage has its forward pass in its backward pass, and recomputes nothing.
    recomputed = 0 if keeps else block * (schedule.num_stages - 1)
    # A chunk that is never the last need not recompute its last product either.
    assert count * model <= work_of(schedule, compiled, keeps) <= count * (model + recomputed)


@pytest.mark.full
def test_every_rank_computes_its_part_of_the_head_and_no_stage_more():
    branches = lanes(build("1f1b", 4, 8, split=True)[1])
    whole = lanes(build("1f1b", 4, 8)[1])
    idle, part = branches["V"]
    # Logits, and the gradients by the hidden state and by the kernel: three products.
    head = 3 * 2 * (ROWS * TOKENS) * WIDTH * VOCABULARY
    # Lookups, and the gradients of tables by them, are no products.
    assert [branch.high for lane in "EG" for branch in branches[lane]] == [0] * 4
    assert (idle.high, part.low, part.high) == (0, head // 4, head // 4)
    stage = branches["B"][1]
    # Where no backward pass needs its stage's output for the loss, none makes the last product of
    # its forward pass again.
    output = 2 * (ROWS * TOKENS) * FFN * WIDTH
    assert stage.low == stage.high == whole["B"][1].low - output
    assert whole["B"][1].high == stage.high + output + head


@pytest.mark.full
@pytest.mark.sample("zero_bubble_h1-recompute-False")
@pytest.mark.parametrize(
    ("name", "backward", "split"),
    [
        ("1f1b", "recompute", False),
        ("1f1b", "recompute", True),
        ("zero_bubble_h1", "recompute", False),
        pytest.param("1f1b", "residuals", False, marks=pytest.mark.full),
        pytest.param("1f1b", "residuals", True, marks=pytest.mark.full),
        pytest.param("zero_bubble_h1", "recompute", True, marks=pytest.mark.full),
    ],
)
def test_sums_of_head_and_embedding_are_never_copied(name, backward, split):
    # Every branch of a tick hands them through, and the stages between the ends only do that.
    module = as_module(build(name, 4, 8, backward, split)[1])
    tokens = VOCABULARY // 4 if split else VOCABULARY
    sums = {(tokens, WIDTH), (WIDTH, tokens)}
    carried = [
        shape.dims
        for visit in visits(module)
        for instruction in visit.computation.instructions
        if instruction.opcode == "while" and visit.count == 1
        for shape in instruction.shapes
        if shape.dims in sums
    ]
    # As sums and as parameters.
    assert len(carried) == 4
    copies = [
        instruction.name
        for visit in visits(module)
        if visit.count > 1
        for instruction in visit.computation.instructions
        if any(shape.dims in sums for shape in instruction.shapes)
        and "copy" in {instruction.opcode, *_fused(module, instruction)}
    ]
    assert copies == []


def _fused(module, instruction):
    """The operations of a fusion that only moves what it is given."""
    if instruction.opcode != "fusion":
        return set()
    (fused,) = module.called(instruction)
    found = {inner.opcode for inner in fused.instructions} - {"parameter", "bitcast"}
    return found if found == {"copy"} else set()


@pytest.mark.full
def test_the_halves_of_a_backward_pass_cost_the_whole():
    whole, halves = (lanes(build(name, 4, 8)[1]) for name in ("1f1b", "zero_bubble_h1"))
    forward = whole["F"][1].low
    both = halves["I"][1].low - forward + halves["W"][1].low
    assert both == whole["B"][1].low - forward
    assert halves["W"][1].low > 0.4 * both


@pytest.mark.full
def test_1f1b_keeps_as_many_stage_inputs_as_the_paper_says():
    schedule, compiled = build("1f1b", 4, 8)
    carried = [
        shape
        for visit in visits(as_module(compiled))
        for instruction in visit.computation.instructions
        if instruction.opcode == "while"
        for shape in instruction.shapes
    ]
    stage_input = (ROWS, TOKENS, WIDTH)
    slots = [shape.dims[0] for shape in carried if shape.dims[1:] == stage_input]
    assert max(slots) == max(peak_live(schedule)) == 4
    # One slot for a gradient on its way back, which the compiler may carry without its dim of 1.
    assert sum(slots) <= max(peak_live(schedule)) + 1
    assert sum(shape.dims == stage_input for shape in carried) <= 1
