"""The head's loss in the region of one replica, whose mesh is abstract."""

import jax
import numpy as np
import optax
from flax import nnx

from axon_dist import build_train_step
from axon_dist.inspect import trace_step
from axon_dist.mesh import abstract_world
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.parallel import compose, diloco, zero

CONFIG = TransformerConfig(
    vocab_size=64, width=16, num_layers=1, num_heads=2, max_length=16, logits="chunked"
)


def test_a_head_in_chunks_is_traced_for_replicas_on_gpus():
    world = abstract_world("nodes=2,dp=2", 4, "gpu", "9.0")
    batch = {"tokens": jax.ShapeDtypeStruct((8, 17), np.int32)}
    strategy = compose(diloco("nodes", every=2), zero(2))
    model = lambda: Transformer(CONFIG, rngs=nnx.Rngs(0))
    step = build_train_step(model, optax.sgd(1e-3), next_token_loss, strategy, world, batch=batch)
    program, _ = trace_step(step, batch)
    assert program.jaxpr.eqns
