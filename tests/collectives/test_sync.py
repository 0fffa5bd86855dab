import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from axon_dist.collectives import sync_gradient, sync_gradients
from axon_dist.core.errors import DTypeError, GroupError


def local_gradient(group, check_vma, loss, w, x):
    """The synchronised gradient of each rank's own loss with respect to a replicated parameter."""
    mesh = group.mesh

    def body(w, x):
        return sync_gradients(jax.grad(loss)(w, x), group)

    rows = P(mesh.axis_names)
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), rows), out_specs=P(), check_vma=check_vma
    )
    return jax.jit(mapped)(w, x)


@pytest.mark.parametrize("check_vma", [True, False])
def test_replicated_parameters_in_both_modes(check_vma, make_world):
    """JAX sums this gradient itself under check_vma=True: averaging it again would give 10."""
    group = make_world("dp=4").default_group
    ranks = jnp.arange(1.0, 5.0)
    gradient = local_gradient(group, check_vma, lambda w, x: w * x[0], 1.0, ranks)
    assert float(gradient) == 2.5


@pytest.mark.parametrize("check_vma", [True, False])
def test_scalar_data_parallelism(check_vma, make_world):
    group = make_world("dp=2").default_group
    loss = lambda w, x: jnp.mean((w * x) ** 2)
    data = jnp.array([1.0, 2.0, 3.0, 4.0])
    gradient = local_gradient(group, check_vma, loss, 1.0, data)
    assert float(gradient) == 15 == float(jax.grad(loss)(1.0, data))
    assert float(1.0 - 0.01 * gradient) == pytest.approx(0.85)


def test_a_gradient_that_varies_over_some_axes_only(make_world):
    """Parameters cast to varying over dp alone: JAX sums over tp, and the library over dp."""
    group = make_world("dp=2,tp=2").default_group

    def body(w, x):
        own = jax.lax.pcast(w, ("dp",), to="varying")
        return sync_gradients(jax.grad(lambda w: jnp.sum(w * x))(own), group)

    mapped = jax.shard_map(
        body,
        mesh=group.mesh,
        in_specs=(P(), P(("dp", "tp"))),
        out_specs=P(),
    )
    assert float(jax.jit(mapped)(1.0, jnp.array([1.0, 2.0, 3.0, 6.0]))) == 3


def test_lists_of_ranks(make_world):
    group = make_world("dp=4").new_group([0, 2])
    x = jnp.array([1.0, 2.0, 3.0, 4.0])
    assert sync_gradient(x, group).tolist() == [2, 2, 2, 4]
    loss = lambda w, x: w * x[0]
    with pytest.raises(GroupError, match=r"already summed over all ranks.*pcast\(params"):
        local_gradient(group, True, loss, 1.0, x)


def test_trees_and_dtypes(make_world):
    group = make_world("dp=2").default_group
    tree = {"w": jnp.ones((2, 3), jnp.bfloat16), "b": [jnp.array([0.0, 4.0])]}
    synced = sync_gradients(tree, group)
    assert synced["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(synced["b"][0], [2, 2])
    with pytest.raises(DTypeError, match="int32"):
        sync_gradient(jnp.array([1, 2]), group)


@pytest.mark.parametrize("check_vma", [True, False])
def test_two_layers_equal_one_device(check_vma, make_world):
    """Linear(4, 8), Linear(8, 3), cross-entropy, one step of SGD on two samples per rank."""
    group = make_world("dp=2").default_group
    draw = np.random.default_rng(0).normal
    params = {"w1": draw(0, 0.5, (4, 8)), "b1": np.zeros(8)}
    params |= {"w2": draw(0, 0.3, (8, 3)), "b2": np.zeros(3)}
    params = jax.tree.map(np.float32, params)
    x = np.float32(
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, -0.3, -0.1, 0.2, 0.5, 0.9, -0.4, 0.1, -0.2]
    )
    batch = {"x": x.reshape(4, 4), "y": np.array([0, 1, 2, 0], np.int32)}

    def loss(p, batch):
        logits = (batch["x"] @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(logits)), batch["y"]])

    ours = local_gradient(group, check_vma, loss, params, batch)
    plain = jax.jit(jax.grad(loss))(params, batch)
    for name in params:
        np.testing.assert_allclose(ours[name], plain[name], rtol=1e-5, atol=1e-7)
