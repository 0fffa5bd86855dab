import pytest

from axon_dist.core.errors import ScheduleError
from axon_dist.schedule import Action, Phase


@pytest.mark.parametrize("text", ["2F0", "0B12", "11I3", "7W7"])
def test_an_action_prints_as_it_parses(text):
    assert str(Action.parse(text)) == text
    assert Action.parse(f" {text} ") == Action.parse(text)


def test_fields_of_an_action():
    assert Action.parse("12W3") == Action(stage=12, phase=Phase.W, microbatch=3)


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F0B", "2F0+2B0", "²F0"])
def test_texts_that_are_not_actions_raise(text):
    with pytest.raises(ScheduleError, match=r"got .*not an action.*such as 2F0"):
        Action.parse(text)


def test_phases_are_the_letters():
    assert [*Phase] == ["E", "F", "V", "B", "I", "W", "G"]
    assert {Phase.F: 1}["F"] == 1
