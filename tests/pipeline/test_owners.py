import jax
import jax.numpy as jnp
import pytest

from axon_dist.core.errors import UnsupportedError
from axon_dist.pipeline.owners import SMALL, owned, sums_of

SIZE = SMALL + 8


def program_of(function, owners, destinations, sizes=None):
    sizes = sizes or {}
    shapes = [jax.ShapeDtypeStruct((sizes.get(name, SIZE),), jnp.float32) for name in owners]
    names = [f"leaf {name}" for name in owners]
    closed = jax.make_jaxpr(function)(*shapes)
    return owned(closed, owners, names, destinations, [f"result {home}" for home in destinations])


def work(program):
    return [(op.equation.primitive.name, op.owner, op.level) for op in program.operations]


def test_a_norm_over_all_is_everybodys_and_one_sum():
    def clip(a, b, c):
        norm = jnp.sqrt(0.0 + jnp.sum(a) + jnp.sum(b) + jnp.sum(c))
        return a / norm, b / norm, c / norm

    program = program_of(clip, ["a", "b", None], ["a", "b", None])
    assert {op.owner for op in program.operations if op.level == 0} == {"a", "b", None}
    assert [w for w in work(program) if w[0] in ("add", "sqrt")] == [
        *[("add", None, 1)] * 3,
        ("sqrt", None, 1),
    ]
    assert [w for w in work(program) if w[0] == "div"] == [
        ("div", "a", 1),
        ("div", "b", 1),
        ("div", None, 1),
    ]
    sums, partial = sums_of(program)
    [terms] = sums.values()
    assert [program.owners[term] for term in terms] == [None, "a", "b", None]
    assert len(partial) == 2


def test_a_norm_of_one_owner_is_its_own():
    scale = lambda a, b: (a / jnp.sum(a), b * jnp.sum(b))
    program = program_of(scale, ["a", "b"], ["a", "b"])
    assert [(owner, level) for _, owner, level in work(program)] == [
        *[("a", 0)] * 2,
        *[("b", 0)] * 2,
    ]
    assert program.num_levels == 1


def test_a_choice_for_several_owners_selects_for_each():
    def skip(a, b):
        ok = jnp.isfinite(jnp.sum(a) + jnp.sum(b))
        return jax.lax.cond(ok, lambda a, b: (a * 2, b * 3), lambda a, b: (a, b), a, b)

    program = program_of(skip, ["a", "b"], ["a", "b"])
    assert [w for w in work(program) if w[0] in ("mul", "select_n")] == [
        ("mul", "a", 0),
        ("mul", "b", 0),
        ("select_n", "a", 1),
        ("select_n", "b", 1),
    ]


def test_values_of_one_owner_are_computed_there():
    fill = lambda a, b: (a + jnp.ones(SIZE), b + 1)
    program = program_of(fill, ["a", "b"], ["a", "b"])
    assert ("broadcast_in_dim", "a", 0) in work(program)


@pytest.mark.parametrize("size", [8, SIZE])
def test_whole_arrays_of_several_owners_only_meet_where_they_are_small(size):
    meet = lambda a, b: (a, b + jnp.concatenate([a, b])[: b.size])
    trace = lambda: program_of(meet, ["a", "b"], ["a", "b"], {"a": size, "b": size})
    if size <= SMALL:
        assert ("concatenate", None, 1) in work(trace())
        return
    with pytest.raises(UnsupportedError, match=r"float32\[1032\] of 'leaf a', and the operation"):
        trace()


def test_results_of_another_owner_are_refused():
    with pytest.raises(UnsupportedError, match=r"of 'leaf b', and 'result a' needs it"):
        program_of(lambda a, b: (b, a), ["a", "b"], ["a", "b"])


def test_unused_results_are_not_computed():
    drop = lambda a, b: (jnp.concatenate([a, b]), a)[1:]
    program = program_of(drop, ["a", "b"], ["a"])
    assert program.operations == ()


def test_sums_of_a_term_twice_count_it_twice():
    def add(a, b):
        x, y = jnp.sum(a), jnp.sum(b)
        return ((x + x) + y,)

    program = program_of(add, ["a", "b"], [None])
    sums, _ = sums_of(program)
    [terms] = sums.values()
    assert [program.owners[term] for term in terms] == ["a", "a", "b"]
