"""What the steps of a search share."""

from axon_dist.step.sharing import shared_value, sharing_steps


def test_a_value_is_made_once_in_a_search_and_forgotten_after_it():
    made = []

    def make():
        made.append(len(made))
        return made[-1]

    assert (shared_value("key", make), shared_value("key", make)) == (0, 1)
    with sharing_steps():
        assert (shared_value("key", make), shared_value("key", make)) == (2, 2)
        assert shared_value("other", make) == 3
        unhashable = ["no hash"]
        assert (shared_value(unhashable, make), shared_value(unhashable, make)) == (4, 5)
    assert shared_value("key", make) == 6
