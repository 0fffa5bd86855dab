"""Constants that JAX moves out of a loop, and that every iteration reads, are small.

JAX computes what depends on no input of a loop once, before the loop: a mask that is broadcast to
all scores, or the zeros of a `where`, become arrays that memory passes over in every turn.
"""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import build_train_step, compose, ddp
from axon_dist.core.compat import inner_programs
from axon_dist.inspect import trace_step
from axon_dist.ir.walk import Literal, inners
from axon_dist.mesh import abstract_world
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.parallel import context_parallel, pipelined

SMALL = 1024
LENGTH = 64


def moved_out(jaxpr, known=()):
    """The shapes of constants that loops read in every turn, in a program and in those within."""
    known = set(known)

    def is_known(atom):
        return isinstance(atom, Literal) or atom in known

    for equation in jaxpr.eqns:
        is_loop = equation.primitive.name in ("scan", "while")
        if equation.primitive.name == "scan":
            consts, _, _ = inners(equation)[0].split_operands(list(equation.invars))
            for atom in consts:
                if not isinstance(atom, Literal) and atom in known:
                    yield atom.aval.shape
        for program in inner_programs(equation):
            inner = getattr(program, "jaxpr", program)
            operands = equation.invars[len(equation.invars) - len(inner.invars) :]
            is_call = not is_loop and len(operands) == len(inner.invars)
            pairs = zip(inner.invars, operands, strict=True) if is_call else ()
            yield from moved_out(inner, [var for var, atom in pairs if is_known(atom)])
        if all(map(is_known, equation.invars)) and not equation.effects:
            known.update(equation.outvars)


def large(jaxpr):
    return [shape for shape in moved_out(jaxpr) if math.prod(shape) > SMALL]


def test_a_mask_of_all_scores_is_found():
    def loss(weights):
        def layer(x, weight):
            at = jnp.arange(LENGTH)
            scores = x @ weight @ x.T
            return jnp.where(at >= at[:, None], scores, 0.0) @ x, None

        return jax.lax.scan(jax.checkpoint(layer), jnp.ones((LENGTH, 8)), weights)[0].sum()

    shape = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)
    assert (LENGTH, LENGTH) in large(jax.make_jaxpr(jax.grad(loss))(shape).jaxpr)


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        ("dp=2,cp=4", compose(ddp(), context_parallel("ring"))),
        ("pp=2,dp=4", compose(pipelined(2, 4), ddp())),
    ],
)
def test_rings_and_pipelines_read_no_large_constant_in_every_turn(mesh, strategy):
    config = TransformerConfig(
        vocab_size=32, width=16, num_layers=2, num_heads=2, ffn_width=16, max_length=LENGTH
    )
    step = build_train_step(
        lambda: Transformer(config, rngs=nnx.Rngs(0)),
        optax.sgd(0.1), next_token_loss, strategy, abstract_world(mesh, 8, "cpu"),
    )  # fmt: skip
    closed, _ = trace_step(step, {"tokens": jax.ShapeDtypeStruct((16, LENGTH + 1), jnp.int32)})
    assert large(closed.jaxpr) == []
