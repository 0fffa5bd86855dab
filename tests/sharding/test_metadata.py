"""A model's annotated shardings are followed, also with logical names and on smaller meshes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from axon_dist.core.errors import DivisibilityError, StrategyConflictError
from axon_dist.mesh import MeshSpec
from axon_dist.sharding import ByRule, FromMetadata, LargestDim, Merge, annotations_of

MESH = MeshSpec(fsdp=4, tp=2)


class Annotated(nnx.Module):
    """One kernel with an annotation and one without."""

    def __init__(self, rngs, names=(None, "tp"), **metadata):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names, **metadata)
        self.up = nnx.Linear(16, 32, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)


def annotated(**kwargs):
    with nnx.use_eager_sharding(False):
        return Annotated(nnx.Rngs(0), **kwargs)


def test_annotations_of_a_model():
    assert annotations_of(annotated()) == (("up/kernel", P(None, "tp")),)
    assert annotations_of(nnx.Linear(2, 3, rngs=nnx.Rngs(0))) == ()


def test_annotations_of_shapes():
    shapes = nnx.eval_shape(annotated)
    assert annotations_of(shapes) == (("up/kernel", P(None, "tp")),)


def test_logical_names_go_through_flax_rules():
    model = annotated(names=("embed", "mlp"), sharding_rules=(("mlp", "tp"), ("embed", None)))
    assert annotations_of(model) == (("up/kernel", P(None, "tp")),)


def test_axes_that_the_mesh_lacks_split_nothing():
    policy = FromMetadata((("w", P("cp", ("tp", "ep"))),))
    assert policy("w", (8, 8), MESH) == P(None, "tp")
    assert policy("w", (8, 8), MeshSpec(fsdp=4)) == P()
    assert policy.decide("v", (8, 8), MESH).reason == "not annotated"


def test_it_claims_before_flexible_policies_and_conflicts_with_fixed_ones():
    policy = FromMetadata((("w", P("fsdp")), ("v", P(None, "tp"))))
    both = Merge((policy, LargestDim(("fsdp",), 1)))
    assert both("w", (8, 64), MESH) == P("fsdp")
    assert both("v", (8, 64), MESH) == P("fsdp", "tp")
    fixed = Merge((policy, ByRule(((r"v", P(None, "fsdp")),), "rule")))
    with pytest.raises(StrategyConflictError, match=r"claimed by 'flax metadata' .tp. and 'rule'"):
        fixed("v", (8, 64), MESH)


def test_an_annotated_dim_that_does_not_divide():
    with pytest.raises(DivisibilityError, match=r"w: dim 0 of \(7, 8\) is split over tp=2"):
        FromMetadata((("w", P("tp")),))("w", (7, 8), MESH)


def test_bridged_linen_metadata():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.ones, (None, "tp"))
            return nn.Dense(4, kernel_init=init)(x)

    with nnx.use_eager_sharding(False):
        model = nnx.bridge.ToNNX(Net(), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 8)))
    found = dict(annotations_of(model))
    assert [spec for path, spec in found.items() if path.endswith("kernel")] == [P(None, "tp")]
    assert jax.tree.leaves(nnx.state(model, nnx.Param))
