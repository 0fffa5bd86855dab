"""The cost of building a step as a model gets deeper: counts, not seconds.

Layers that are kept stacked are built, traced and lowered once, however many there are. Layers in a
list are each an object with arrays of its own, and cost what they are: so much each, and no more
for those that there are besides. The blocks of a pipeline are calls of one program.
"""

import cProfile
import pstats
import re

import jax
import optax
import pytest
from flax import nnx

from axon_dist import ActivationCheckpointing, World, build_train_step, compose
from axon_dist.inspect import trace_step
from axon_dist.ir.walk import equations
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.parallel import STRATEGIES

BATCH = {"tokens": jax.ShapeDtypeStruct((16, 9), "int32")}
PIPELINE = {"pipeline": {"num_microbatches": 2}}


def make(layers, scan, mesh, names):
    config = TransformerConfig(
        vocab_size=32, width=16, num_layers=layers, num_heads=2, ffn_width=32, max_length=16,
        scan_layers=scan,
    )  # fmt: skip
    world = World.init(mesh, jax.devices()[:8])
    factory = lambda: Transformer(config, rngs=nnx.Rngs(0))
    strategies = [STRATEGIES[name](factory, world, **more) for name, more in names.items()]
    return build_train_step(
        factory,
        optax.adamw(1e-3),
        next_token_loss,
        compose(*strategies),
        world,
        clip_norm=1.0,
        precision="bf16",
        remat=ActivationCheckpointing(classes=("Block",)),
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        ("fsdp=8", {"full_shard": {}}),
        ("fsdp=4,tp=2", {"full_shard": {}, "tensor": {"sequence": True}}),
        ("fsdp=4,cp=2", {"full_shard": {}, "context": {}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_stacked_layers_cost_nothing_more(mesh, names):
    sizes = []
    for layers in (2, 32):
        step = make(layers, True, mesh, names)
        program, _ = trace_step(step, BATCH)
        lowered = step.lower(BATCH).as_text()
        sizes.append((sum(1 for _ in equations(program.jaxpr)), len(re.findall("\n", lowered))))
    assert sizes[0] == sizes[1]


def calls_of(run):
    """How often each function of this library is called by `run`."""
    profile = cProfile.Profile()
    profile.runcall(run)
    calls = {name: found[1] for name, found in pstats.Stats(profile).stats.items()}
    return {name: count for name, count in calls.items() if "axon_dist" in name[0]}


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "names"),
    [("fsdp=8", {"full_shard": {}}), ("pp=2", PIPELINE)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_layer_of_a_list_costs_the_same(mesh, names):
    world = f"{mesh},dp=4" if mesh == "pp=2" else mesh
    strategies = {"ddp": {}, **names} if mesh == "pp=2" else names

    def run(layers):
        trace_step(make(layers, False, world, strategies), BATCH)

    run(2)  # what is done once in a process
    few, some, many = (calls_of(lambda layers=layers: run(layers)) for layers in (4, 8, 16))
    before = lambda name: (few.get(name, 0), some.get(name, 0))
    grows = {
        name: (*before(name), count)
        for name, count in many.items()
        if count > 100 and count - before(name)[1] > 2.2 * (before(name)[1] - before(name)[0])
    }
    assert not grows


@pytest.mark.full
@pytest.mark.sample("pp=2,fsdp=2,tp=2-")
@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        ("pp=2,fsdp=2,tp=2", {"full_shard": {}, "tensor": {"sequence": True}}),
        ("pp=2,dp=4", {"ddp": {}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_blocks_of_a_pipeline_are_calls_of_one_program(mesh, names):
    text = make(8, True, mesh, names | PIPELINE).lower(BATCH).as_text()
    programs = re.findall(r"func\.func private @(axon_unit\w*)", text)
    calls = [len(re.findall(rf"call @{name}\(", text)) for name in programs]
    # The forward pass, and of the backward pass that of its recomputation and the gradients.
    assert calls == [4, 4, 4]
