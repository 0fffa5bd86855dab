import numpy as np
import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.weights import Form

FORMS = [
    (Form(), (4, 6)),
    (Form("out in -> in out"), (4, 6)),
    (Form("(head pair two) in -> in (head two pair)", {"head": 2, "two": 2}), (12, 5)),
    (Form("d c p q -> (p q c) d"), (3, 2, 4, 4)),
    (Form("(head size) in -> in head size", {"size": 3}), (6, 5)),
    (Form("a -> a"), (7,)),
    (Form("out in->in out"), (4, 6)),
]


@pytest.mark.parametrize(("form", "shape"), FORMS, ids=[form.text or "as is" for form, _ in FORMS])
def test_a_slice_is_that_of_the_rearranged_array(form, shape):
    rng = np.random.default_rng(0)
    array = rng.standard_normal(shape)
    whole = form.apply(array)
    assert whole.shape == form.shape_of(shape)
    for _ in range(20):
        starts = [rng.integers(0, n) for n in whole.shape]
        stops = [rng.integers(a, n) + 1 for a, n in zip(starts, whole.shape, strict=True)]
        index = tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))
        np.testing.assert_array_equal(form.take(array, index), whole[index])


@pytest.mark.parametrize("text", ["", "a b c -> b c a", "a b c->b c a"])
def test_the_inverse_gives_the_array_back(text):
    array = np.random.default_rng(0).standard_normal((2, 3, 4))
    form = Form(text)
    np.testing.assert_array_equal(form.inverse.apply(form.apply(array)), array)


def test_interleaved_rotary_pairs_become_halves_and_go_back():
    form = Form("(head pair two) in -> in (head two pair)", {"head": 2, "two": 2})
    kernel = np.arange(8 * 3).reshape(8, 3)
    rows = [0, 2, 1, 3, 4, 6, 5, 7]
    np.testing.assert_array_equal(form.apply(kernel), kernel[rows].T)
    np.testing.assert_array_equal(form.inverse.apply(form.apply(kernel)), kernel)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b", "must have two sides"),
        ("a b -> a", "must name every dim once on each side"),
        ("a a -> a a", "must name every dim once"),
        ("(a b -> a b", "empty or not balanced"),
        ("a * -> * a", r"cannot read 'a \*'"),
    ],
)
def test_a_text_that_is_no_form(text, message):
    with pytest.raises(ConfigError, match=message):
        Form(text)


def test_a_shape_that_does_not_fit():
    assert "has 2 dims, but the array has the shape [3]" in str(Form("a b -> b a").fault((3,)))
    assert "needs sizes={'a': ...}" in str(Form("(a b) -> b a").fault((6,)))
    assert "does not fit [7]" in str(Form("(a b) -> b a", {"a": 2}).fault((7,)))
    assert Form("(a b) -> b a", {"a": 2}).fault((6,)) is None
