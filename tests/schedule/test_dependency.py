import pytest

from axon_dist.schedule import Action
from axon_dist.schedule.action import dependencies


@pytest.mark.parametrize(
    ("action", "scheduled", "needed"),
    [
        ("0F1", "", ""),
        ("2F1", "", "1F1"),
        ("2B1", "", "2F1"),
        ("1B1", "2B1", "1F1 2B1"),
        ("1B1", "2I1 2W1", "1F1 2I1"),
        ("1I1", "2B1", "1F1 2B1"),
        ("1W1", "2I1", "1I1"),
        ("1B1", "", "1F1 2B1"),
        ("1B1", "2I0", "1F1 2B1"),
        ("0V1", "", "2F1"),
        ("1E1", "0E1", ""),
        ("0F1", "0E1 1E1 2E1 0E0", "0E1 1E1 2E1"),
        ("1F1", "0E1", "0F1"),
        ("1G1", "0I1", "0I1"),
        ("1G1", "", "0B1"),
        ("2B1", "0V1 1V1 2V1 0V0", "2F1 0V1 1V1 2V1"),
        ("2I1", "0V1", "2F1 0V1"),
        ("1B1", "0V1 2B1", "1F1 2B1"),
    ],
)
def test_what_an_action_needs(action, scheduled, needed):
    others = {Action.parse(text) for text in scheduled.split()}
    found = dependencies(Action.parse(action), 3, others)
    assert " ".join(map(str, found)) == needed
