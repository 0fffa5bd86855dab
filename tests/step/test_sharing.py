"""What the steps of a search share."""

from axon_dist.step.sharing import once, sharing_steps


def test_a_value_is_made_once_in_a_search_and_forgotten_after_it():
    made = []

    def make():
        made.append(len(made))
        return made[-1]

    assert (once("key", make), once("key", make)) == (0, 1)
    with sharing_steps():
        assert (once("key", make), once("key", make), once("other", make)) == (2, 2, 3)
        unhashable = ["no hash"]
        assert (once(unhashable, make), once(unhashable, make)) == (4, 5)
    assert once("key", make) == 6
