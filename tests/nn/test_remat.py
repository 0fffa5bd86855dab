"""Activation checkpointing: the saved memory, which blocks are recomputed, and the errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon_dist.core.errors import ConfigError
from axon_dist.nn import ActivationCheckpointing, block_classes, by_class, summed
from axon_dist.nn.remat import ClassIs


@pytest.mark.parametrize(("interval", "saved"), [(1, 9), (2, 5), (3, 4), (4, 3), (8, 2), (99, 2)])
def test_boundaries_kept_of_eight_blocks(interval, saved):
    assert ActivationCheckpointing(interval).num_saved(8) == saved


@pytest.mark.parametrize(("blocks", "group"), [(1, 1), (16, 4), (25, 5), (64, 8), (100, 10)])
def test_the_square_root_balances(blocks, group):
    assert ActivationCheckpointing("sqrt").group_size(blocks) == group


@pytest.mark.parametrize("interval", [0, -1, 1.5, True, "cube"])
def test_impossible_intervals(interval):
    with pytest.raises(
        ConfigError, match=r"interval( is|=).*; (it must be at least 1 block|give a whole number)"
    ):
        ActivationCheckpointing(interval)


def test_unknown_policies():
    with pytest.raises(ConfigError, match=r"remat policy 'dot'\. Did you mean 'dots'"):
        ActivationCheckpointing(policy="dot")


def test_every_policy_is_one_of_jax():
    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))

    def kept(policy):
        remat = ActivationCheckpointing(policy=policy).remat
        f = jax.checkpoint(lambda w: jnp.sin(jnp.tanh(x @ w)).sum(), policy=remat)
        return sum(leaf.shape == (2, 4) for leaf in jax.tree.leaves(jax.vjp(f, w)[1]))

    assert kept("nothing") == 0
    assert kept("dots") == kept("dots_no_batch") == 1
    assert kept("everything") > 1
    assert callable(ActivationCheckpointing(policy="offload_dots").remat)


def test_sums_are_kept_and_nothing_else():
    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    f = jax.checkpoint(
        lambda w: jnp.sin(jnp.tanh(summed(x @ w))).sum(),
        policy=ActivationCheckpointing(policy="sums").remat,
    )
    kept = [leaf for leaf in jax.tree.leaves(jax.vjp(f, w)[1]) if leaf.shape == (2, 4)]
    np.testing.assert_array_equal(kept, [x @ w])


class Block(nnx.Module):
    """A block with its own list of layers."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs)])


class Net(nnx.Module):
    """Blocks in a list, activations in another, a head outside."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.drops = nnx.List([nnx.Dropout(0.1)])
        self.head = nnx.Linear(2, 2, rngs=rngs)


def test_block_classes_are_those_of_outermost_lists_that_hold_parameters():
    assert block_classes(Net(nnx.Rngs(0))) == ("Block",)
    assert block_classes(nnx.Linear(2, 2, rngs=nnx.Rngs(0))) == ()


def test_by_class_is_a_value():
    assert by_class("A", "B") == ClassIs(("A", "B"))
    assert by_class("Linear")("head", nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


def test_no_blocks_save_one_boundary_and_fewer_do_not_exist():
    for interval in ("sqrt", 1, 4):
        assert ActivationCheckpointing(interval).num_saved(0) == 1
        with pytest.raises(ConfigError, match=r"num_blocks=-1, an int; give a whole number"):
            ActivationCheckpointing(interval).num_saved(-1)
