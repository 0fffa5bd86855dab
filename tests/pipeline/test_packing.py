import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_dist.pipeline.tables import Packing

shapes = st.lists(
    st.builds(
        jax.ShapeDtypeStruct,
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
        st.sampled_from([jnp.dtype("float32"), jnp.dtype("int32"), jnp.dtype("bool")]),
    ),
    max_size=4,
)


def there_and_back(packing, number, values):
    """Packs values and unpacks them again, as one program."""

    @jax.jit
    def both(values):
        packed = packing.pack(values)
        return packed, packing.unpack(number, packed)

    return both(values)


@settings(deadline=None, max_examples=20)
@given(st.lists(shapes, min_size=1, max_size=3))
def test_unpacking_undoes_packing(variants):
    packing = Packing(variants)
    rng = np.random.default_rng(0)
    for number, variant in enumerate(variants):
        values = [rng.integers(0, 2, s.shape).astype(s.dtype) for s in variant]
        packed, unpacked = there_and_back(packing, number, values)
        assert [(x.shape, x.dtype) for x in packed] == [(f.shape, f.dtype) for f in packing.packed]
        for got, want in zip(unpacked, values, strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)


def test_keys_are_packed_as_integers():
    key = jax.random.key(3)
    for variants in ([[key], [key, key]], [[key]]):
        packing = Packing(variants)
        packed = packing.pack([key])
        assert [x.dtype for x in packed] == [jnp.uint32]
        assert packing.unpack(0, packed) == [key]
