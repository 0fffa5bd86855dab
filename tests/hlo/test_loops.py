import jax
import jax.numpy as jnp
import pytest
from jax import lax

from axon_dist.hlo.parse import parse
from axon_dist.hlo.walk import visits

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


def test_what_the_compiler_states_is_what_the_simulation_finds():
    def body(x):
        return lax.fori_loop(3, 17, lambda i, y: y * jnp.sin(y + i), x)

    text = jax.jit(body).lower(jnp.ones((512, 512))).compile().as_text()
    assert '"known_trip_count":{"n":"14"}' in text
    blind = text.replace("known_trip_count", "forgotten")
    for version in (text, blind):
        assert 14 in [visit.count for visit in visits(parse(version))]
        assert not any(visit.unknown_trip for visit in visits(parse(version)))
