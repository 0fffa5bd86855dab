"""Three parts of one program: equal to `jax.vjp`, and no product computed twice."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.pipeline import MicrobatchData, StageProgram, Wire
from axon_dist.pipeline.stage import StageOperands, StagePasses, pull_back


def two_layers(weights, rest, data, stage, wire):
    """A multi-layer perceptron of two layers, without biases."""
    del rest, data, stage
    (first, second), (x,) = weights[0], wire.floats
    return Wire([jax.jit(lambda x: jnp.tanh(x @ first))(x) @ second], [])


PROGRAM = StageProgram((0,), 0, range(1), None, two_layers, None, (), (), ())


def operands():
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    weights, wire = [[array(8, 16), array(16, 8)]], Wire([array(4, 8)], [])
    return StageOperands(weights, {}, MicrobatchData([], []), jnp.int32(0), wire), [array(4, 8)]


def products(piece):
    return sum(equation.primitive.name == "dot_general" for equation in piece.equations)


@pytest.mark.parametrize("saves_residuals", [False, True])
def test_equals_the_whole_backward_pass(saves_residuals):
    at, seed = operands()
    parts = StagePasses.of(PROGRAM, at, seed, saves_residuals)
    want_y, pull = pull_back(PROGRAM, at)
    want = pull(seed)
    y, kept = parts.forward(at)
    later = at._replace(wire=Wire([jnp.zeros((4, 8))], [])) if saves_residuals else at
    inputs, held = parts.input_gradient(later, kept, seed)
    weights, _ = parts.weight_gradient(later, held)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (y, inputs, weights), (want_y, want.inputs, want.weights))


@pytest.mark.parametrize("layers", [two_layers, jax.checkpoint(two_layers)])
def test_every_part_has_a_product_per_layer(layers):
    at, seed = operands()
    parts = StagePasses.of(dataclasses.replace(PROGRAM, middle=layers), at, seed)
    halves = [parts.forward_part, parts.input_part, parts.weight_part]
    assert [products(half) for half in halves] == [2, 2, 2]


def test_weights_are_not_handed_over():
    at, seed = operands()
    parts = StagePasses.of(PROGRAM, at, seed, saves_residuals=True)
    shapes = {shape.shape for shape in parts.shapes([*parts.residuals, *parts.intermediates])}
    assert shapes <= {(4, 8), (4, 16)}


def scaled_layer(weights, rest, data, stage, wire):
    """A scale, a layer and a bias."""
    del rest, data, stage
    (scale, kernel, bias), (x,) = weights[0], wire.floats
    return Wire([jnp.tanh(x * scale) @ kernel + bias], [])


def test_gradients_of_scales_and_biases_are_not_put_off():
    array = lambda *shape: jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    wire = Wire([array(4, 8)], [])
    at = StageOperands(
        [[array(8), array(8, 6), array(6)]], {}, MicrobatchData([], []), jnp.int32(0), wire
    )
    program = StageProgram((0,), 0, range(1), None, scaled_layer, None, (), (), ())
    seed = [array(4, 6)]
    parts = StagePasses.of(program, at, seed)
    # The input and the cotangent of the product, and two finished gradients.
    shapes = parts.shapes(parts.intermediates)
    assert sorted(shape.shape for shape in shapes) == [(4, 6), (4, 8), (6,), (8,)]
    assert [e.primitive.name for e in parts.weight_part.equations].count("reduce_sum") == 0
    _, kept = parts.forward(at)
    _, held = parts.input_gradient(at, kept, seed)
    want = pull_back(program, at)[1](seed)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, parts.weight_gradient(at, held)[0], want.weights)
