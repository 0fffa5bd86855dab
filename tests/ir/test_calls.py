"""Changed calls: around each other, by value, and without classes that pile up."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from axon_dist.core.modules import wrap_calls
from axon_dist.ir.units import mark_units
from axon_dist.ops.precision import MixedPrecision, autocast


@dataclasses.dataclass(frozen=True)
class Plus:
    """Adds to what a call returns."""

    number: float

    def __call__(self, method, module, *args):
        return method(module, *args) + self.number


class Policy:
    """A rematerialisation policy of which it can be told whether it lives."""

    def __call__(self, *_, **__):
        return False


def linear():
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def test_the_last_wrapping_is_the_outermost():
    layer, x = linear(), jnp.ones((1, 2))
    before = layer(x)
    wrap_calls(layer, {"__call__": Plus(1.0)})
    wrap_calls(layer, {"__call__": lambda method, module, x: 2 * method(module, x)})
    assert jnp.allclose(layer(x), 2 * (before + 1))
    assert jnp.allclose(linear()(x), before)


def test_equal_modules_wrapped_by_equal_functions_are_equal():
    one, other, third = linear(), linear(), linear()
    wrap_calls(one, {"__call__": Plus(1.0)})
    wrap_calls(other, {"__call__": Plus(1.0)})
    wrap_calls(third, {"__call__": Plus(2.0)})
    assert nnx.graphdef(one) == nnx.graphdef(other) != nnx.graphdef(third)
    assert hash(nnx.graphdef(one)) == hash(nnx.graphdef(other))


def test_other_methods_stay_as_they_are():
    layer = nnx.Embed(4, 2, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 2))
    before = layer.attend(x), layer(jnp.zeros(1, jnp.int32))
    wrap_calls(layer, {"attend": Plus(1.0)})
    assert jnp.allclose(layer.attend(x), before[0] + 1)
    assert jnp.allclose(layer(jnp.zeros(1, jnp.int32)), before[1])


def number_of_classes(base):
    found = base.__subclasses__()
    return len(found) + sum(map(number_of_classes, found))


@pytest.mark.full
def test_many_steps_leave_neither_classes_nor_programs_behind():
    """Flax and JAX keep every class of modules forever, so that none may be made per step."""

    def step():
        policy = Policy()
        model = nnx.Sequential(linear(), linear())
        graphdef, state = nnx.split(model)

        def run(state, x):
            merged = nnx.merge(graphdef, state, copy=True)
            for layer in merged.layers:
                wrap_calls(layer, {"__call__": Plus(float(id(policy)))})
            mark_units(merged, lambda _, module: isinstance(module, nnx.Linear), policy)
            autocast(merged, MixedPrecision(compute=jnp.bfloat16))
            return merged(x)

        jax.jit(run).lower(state, jnp.ones((1, 2)))
        return weakref.ref(policy)

    step()
    before = number_of_classes(nnx.Module)
    policies = [step() for _ in range(4)]
    # What programs JAX keeps, up to its own bound, is not ours to count.
    jax.clear_caches()
    gc.collect()
    assert number_of_classes(nnx.Module) == before
    assert [policy() for policy in policies] == [None] * 4
