import jax
import jax.numpy as jnp
import pytest
from jax import lax

from axon_dist.inspect.computations import visits
from axon_dist.inspect.parse import parse

LOOP = """HloModule step, num_partitions=1

%increment (p: s32[], q: s32[]) -> s32[] {{
  %p = s32[] parameter(0)
  %q = s32[] parameter(1)
  ROOT %sum = s32[] add(%p, %q)
}}

%cond (c: (s32[], f32[8], s32[])) -> pred[] {{
  %c = (s32[], f32[8]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] get-tuple-element(%c), index=2
  ROOT %less = pred[] compare(%i, %n), direction={direction}
}}

%body (c: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {{
  %c = (s32[], f32[8]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[8]{{0}} get-tuple-element(%c), index=1
  %n = s32[] get-tuple-element(%c), index=2
  %step = s32[] constant({step})
  %next = s32[] fusion(%i, %step), kind=kLoop, calls=%increment
  ROOT %t = (s32[], f32[8]{{0}}, s32[]) tuple(%next, %x, %n)
}}

ENTRY %main (x: f32[8], dynamic: s32[]) -> (s32[], f32[8], s32[]) {{
  %x = f32[8]{{0}} parameter(0)
  %dynamic = s32[] parameter(1)
  %start = s32[] constant({start})
  %bound = s32[] constant({bound})
  %init = (s32[], f32[8]{{0}}, s32[]) tuple(%start, %x, {bound_name})
  ROOT %w = (s32[], f32[8]{{0}}, s32[]) while(%init), condition=%cond, body=%body
}}
"""


def trips(start, bound, step, direction, bound_name="%bound"):
    text = LOOP.format(**locals())
    by_name = {visit.computation.name: visit for visit in visits(parse(text))}
    return by_name["body"].count, by_name["body"].unknown_trip


@pytest.mark.parametrize(
    ("start", "bound", "step", "direction", "expected"),
    [
        (0, 24, 1, "LT", 24),
        (1, 24, 1, "LT", 23),
        (0, 24, 5, "LT", 5),
        (0, 24, 1, "LE", 25),
        (23, 0, -1, "GE", 24),
        (23, 0, -1, "GT", 23),
        (0, 8, 2, "NE", 4),
        (5, 5, 1, "LT", 0),
    ],
)
def test_the_counter_of_a_loop_is_simulated(start, bound, step, direction, expected):
    assert trips(start, bound, step, direction) == (expected, False)


def test_a_bound_that_is_an_argument_is_unknown():
    assert trips(0, 24, 1, "LT", bound_name="%dynamic") == (1, True)


def test_a_loop_without_end_is_unknown():
    assert trips(0, 24, 0, "LT") == (1, True)


CALL = """
%outlined (c: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %c = (s32[], f32[8]{0}, s32[]) parameter(0)
  ROOT %w = (s32[], f32[8]{0}, s32[]) while(%c), condition=%cond, body=%body
}

ENTRY"""


def outlined(bounds):
    """The loop in a computation of its own, called once for each bound."""
    text = LOOP.format(start=0, bound=bounds[0], step=1, direction="LT", bound_name="%bound")
    calls = "".join(
        f"""  %bound.{number} = s32[] constant({bound})
  %init.{number} = (s32[], f32[8]{{0}}, s32[]) tuple(%start, %x, %bound.{number})
  %call.{number} = (s32[], f32[8]{{0}}, s32[]) call(%init.{number}), to_apply=%outlined
"""
        for number, bound in enumerate(bounds)
    )
    head, loop = text.replace("\nENTRY", CALL).rsplit("  ROOT %w", 1)
    assert loop.count("\n") == 2
    return parse(f"{head}{calls}  ROOT %t = (f32[8]{{0}}) tuple(%x)\n}}")


@pytest.mark.parametrize(
    ("bounds", "expected"), [([24], (24, False)), ([7, 7], (7, False)), ([7, 8], (1, True))]
)
def test_a_loop_that_is_called_starts_from_what_its_calls_agree_on(bounds, expected):
    found = [v for v in visits(outlined(bounds)) if v.computation.name == "body"]
    assert [(v.count, v.unknown_trip) for v in found] == [expected] * len(bounds)


def test_what_the_compiler_states_is_what_the_simulation_finds():
    def body(x):
        return lax.fori_loop(3, 17, lambda i, y: y * jnp.sin(y + i), x)

    text = jax.jit(body).lower(jnp.ones((512, 512))).compile().as_text()
    assert '"known_trip_count":{"n":"14"}' in text
    blind = text.replace("known_trip_count", "forgotten")
    for version in (text, blind):
        assert 14 in [visit.count for visit in visits(parse(version))]
        assert not any(visit.unknown_trip for visit in visits(parse(version)))
