import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_dist.core.errors import MeshError
from axon_dist.mesh import AXIS_ORDER, MeshSpec

SIZES = st.dictionaries(st.sampled_from(AXIS_ORDER), st.integers(1, 8), min_size=1)


@given(SIZES)
def test_prints_what_it_parses(sizes):
    spec = MeshSpec(sizes)
    assert MeshSpec.parse(str(spec)) == spec == MeshSpec(**sizes) == MeshSpec(spec.axes)
    assert spec.size == math.prod(sizes.values())
    assert list(spec) == list(spec.names) == list(sizes)
    assert spec.resolve(spec.size) == spec


@given(SIZES, st.data())
def test_one_axis_takes_what_is_left(sizes, data):
    axis = data.draw(st.sampled_from(list(sizes)))
    whole = MeshSpec(sizes)
    assert MeshSpec({**sizes, axis: -1}).resolve(whole.size) == whole


@pytest.mark.parametrize(
    ("axes", "size"),
    [
        ("dp=8,tp=16", 128),
        ("dp=4,tp=32", 128),
        ("pp=8,dp=8,tp=16", 1024),
        ("pp=8,dp=4,tp=32", 1024),
    ],
)
def test_products(axes, size):
    assert MeshSpec(axes).size == size


def test_axes_keep_the_order_they_are_given_in():
    assert MeshSpec("tp=2,dp=4").names == ("tp", "dp")
    assert MeshSpec(tp=2, dp=4) != MeshSpec(dp=4, tp=2)
    spec = MeshSpec(" dp = 2 , tp=3,")
    assert (spec.shape, spec["tp"], "pp" in spec, "dp" in spec) == (
        {"dp": 2, "tp": 3},
        3,
        False,
        True,
    )
    assert repr(spec) == "MeshSpec(dp=2,tp=3)"


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("", "without axes; name at least one, such as dp=-1"),
        ("fdsp=2", r"unknown mesh axis 'fdsp'\. Did you mean 'fsdp'\?"),
        ("dp=2,dp=4", r"'dp' is named twice in \['dp', 'dp'\]; name it once"),
        ("dp=0", "'dp' has size 0; it must be a positive number, or -1"),
        ("dp=-2", "'dp' has size -2"),
        ({"dp": True}, "'dp' has size True"),
        ({"dp": 2.0}, "'dp' has size 2.0"),
        ("dp=-1,tp=-1", r"axes \['dp', 'tp'\] all have size -1; give it to only one"),
        ("dp", "cannot read 'dp' in mesh 'dp'; write axes as name=size"),
        ("dp=two", "cannot read 'dp=two'"),
    ],
)
def test_impossible_meshes(axes, message):
    with pytest.raises(MeshError, match=message):
        MeshSpec(axes)


def test_axes_come_in_one_of_two_ways():
    with pytest.raises(MeshError, match=r"both 'dp=2' and the keywords .*; give the axes in one"):
        MeshSpec("dp=2", tp=2)


def test_the_product_must_be_the_number_of_devices():
    says = r"dp=2,pp=2,tp=3 needs 12 devices and got 8; .* mesh=dp=2,pp=2,tp=2, .*emulate=12, "
    with pytest.raises(MeshError, match=says):
        MeshSpec(dp=2, pp=2, tp=3).resolve(8)
    with pytest.raises(MeshError, match="needs a multiple of 3 devices and got 8"):
        MeshSpec(dp=-1, tp=3).resolve(8)
    with pytest.raises(MeshError, match=r"axis of size -1; call resolve\(num_devices\) first"):
        _ = MeshSpec(dp=-1).size


def test_unknown_axes_are_named():
    with pytest.raises(MeshError, match=r"mesh dp=2 has no axis 'tp'\..* Valid: dp"):
        MeshSpec(dp=2)["tp"]
