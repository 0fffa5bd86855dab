"""Eight nodes of eight H100s, a replica each: what their program sends, and over which links."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import (
    ActivationCheckpointing,
    World,
    build_train_step,
    compose,
    fsdp,
    tensor_parallel,
)
from axon_dist.inspect import collectives, lower_outer_steps, target_devices
from axon_dist.mesh.targets import missing_compiler
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.parallel import diloco
from axon_dist.step.replicas import Outer

TARGET, LENGTH = "h100:8x8", 4096

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(missing_compiler(TARGET) is not None, reason="needs the CUDA compiler"),
]
WITHIN = {
    "fsdp": ("nodes=8,fsdp=8", lambda: (fsdp(),)),
    "fsdp x tp": (
        "nodes=8,fsdp=4,tp=2",
        lambda: (fsdp(), tensor_parallel("transformer", sequence=True)),
    ),
}


def build(within, **slow):
    axes, parts = WITHIN[within]
    config = TransformerConfig.preset("1b", num_layers=2, attention="cudnn", max_length=LENGTH)
    return build_train_step(
        lambda: Transformer(config, rngs=nnx.Rngs(0)),
        optax.adamw(3e-4),
        next_token_loss,
        compose(diloco("nodes", every=100, **slow), *parts()),
        World.init(axes, devices=list(target_devices(TARGET))),
        clip_norm=1.0,
        precision="bf16",
        remat=ActivationCheckpointing(classes=("Block",)),
    )


@pytest.mark.parametrize("within", WITHIN)
def test_a_step_sends_nothing_between_nodes(within):
    step = build(within)
    tokens = jax.ShapeDtypeStruct((64, LENGTH + 1), jnp.int32)
    ledger = collectives(step.lower({"tokens": tokens}).compile(), step.world.mesh)
    assert ledger.by_link().keys() == {"fast"}
    assert not any("nodes" in (row.axes or ("nodes",)) for row in ledger if row.wire_bytes)


@pytest.mark.parametrize("compress", [None, "int8", "fp8"])
def test_an_outer_step_sends_the_formula_over_the_slow_axis_only(compress):
    step = build("fsdp", compress=compress, fragments=2)
    ledgers = [
        collectives(lowered.compile(), step.world.mesh) for lowered in lower_outer_steps(step)
    ]
    sent = [ledger.by_link()["slow"] for ledger in ledgers]
    want = Outer(step.plan).wire_bytes()
    assert sum(sent) == pytest.approx(want, rel=0.002)
    assert {row.axis for ledger in ledgers for row in ledger} == {"nodes"}
    # Halves of the parameters, as far as a table of embeddings lets itself be halved.
    assert max(sent) < 0.75 * sum(sent)
    params = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(step.plan.state_plan.params))
    each = 4.0 if compress is None else 1 + 4 / 256
    assert want == pytest.approx(2 * 7 / 8 * each * params / 8, rel=0.002)
