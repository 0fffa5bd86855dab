"""Decisions of process 0, and how its errors reach the others."""

import pytest

from axon_dist.checkpoint.layout import broadcast_json, is_main, on_main
from axon_dist.core.errors import CheckpointError, ConfigError, DamagedCheckpointError


def test_any_json_comes_through_whole():
    value = {"step": 7, "text": "größer", "list": [None, True, 1.5, "x" * 3000], "empty": {}}
    assert is_main()
    assert broadcast_json(value) == value
    assert on_main(lambda: value) == value
    assert on_main(lambda: None) is None


@pytest.mark.parametrize("kind", [CheckpointError, DamagedCheckpointError, ConfigError])
def test_an_error_arrives_as_what_it_was(kind):
    def fail():
        raise kind("what is wrong")

    with pytest.raises(kind, match=r"^what is wrong$") as error:
        on_main(fail)
    assert type(error.value) is kind


def test_an_error_of_someone_else_is_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        on_main(lambda: 1 // 0)
