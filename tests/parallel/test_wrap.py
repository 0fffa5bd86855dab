"""Which modules are gathered and freed as one."""

import jax.numpy as jnp
import pytest
from flax import nnx

from axon_dist import SizeBasedAutoWrapPolicy, TransformerAutoWrapPolicy
from axon_dist.core.errors import ConfigError

from . import tower


class Sized(nnx.Module):
    """Holds as many parameters as it is told to, and modules inside."""

    def __init__(self, own, *inner):
        self.own = nnx.Param(jnp.zeros(own))
        self.inner = nnx.List(inner)

    def __call__(self):
        return self.own.sum() + sum(module() for module in self.inner)


@pytest.mark.parametrize(
    ("inner", "units"),
    [
        ((60, 60), {"inner/0"}),
        ((150, 60), {"inner/0/inner/0"}),
        ((150, 120), {"inner/0/inner/0", "inner/0/inner/1"}),
        ((20, 20), set()),
    ],
)
def test_by_size_the_smallest_module_that_holds_enough(inner, units):
    model = Sized(1, Sized(0, *(Sized(size) for size in inner)))
    assert SizeBasedAutoWrapPolicy(100).units(model) == units


def test_the_model_itself_is_never_one_by_size():
    assert SizeBasedAutoWrapPolicy(100).units(Sized(500)) == frozenset()


def test_by_class_or_by_name_or_whatever_repeats():
    model = tower.make(2)()
    blocks = {"blocks/0", "blocks/1"}
    assert TransformerAutoWrapPolicy(tower.Block).units(model) == blocks
    assert TransformerAutoWrapPolicy("Block").units(model) == blocks
    assert TransformerAutoWrapPolicy().units(model) == blocks
    assert TransformerAutoWrapPolicy("Embed").units(model) == {"table"}
    assert TransformerAutoWrapPolicy(tower.Block) == TransformerAutoWrapPolicy("Block")


def test_a_size_below_one():
    with pytest.raises(ConfigError, match=r"min_params is 0; it must be at least 1 parameter"):
        SizeBasedAutoWrapPolicy(0)
