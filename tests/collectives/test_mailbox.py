import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_dist.collectives import Mailbox
from axon_dist.core.errors import GroupError


def test_a_message_arrives_as_it_was_sent():
    mailbox, value = Mailbox(2), np.array([1, 2, 3])
    mailbox.send(value, src=0, dst=1, tag=5)
    value[:] = 0
    assert mailbox.recv(0, 1, 5, size=3).tolist() == [1, 2, 3]
    assert len(mailbox) == 0


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 3), max_size=30))
def test_messages_of_one_address_are_first_in_first_out(addresses):
    mailbox = Mailbox(3)
    for number, address in enumerate(addresses):
        mailbox.send(number, *address)
    for address in set(addresses):
        sent = [number for number, other in enumerate(addresses) if other == address]
        assert [int(mailbox.recv(*address)) for _ in sent] == sent
        with pytest.raises(GroupError, match="no message"):
            mailbox.recv(*address)
    assert len(mailbox) == 0


def test_a_wrong_size_raises_and_keeps_the_message():
    mailbox = Mailbox(2)
    mailbox.send([1.0, 2.0, 3.0], 0, 1)
    with pytest.raises(GroupError, match=r"has 3 elements, but size=2 was expected.*size=3"):
        mailbox.recv(0, 1, size=2)
    assert mailbox.recv(0, 1, size=3).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ((2, 0, 0), r"src=2 is not a rank of 2; ranks are 0\.\.1"),
        ((0, -1, 0), "dst=-1 is not a rank"),
        ((0, 1, -1), "tag -1; tags are numbers from 0"),
    ],
)
def test_impossible_addresses(address, message):
    with pytest.raises(GroupError, match=message):
        Mailbox(2).send(1, *address)
    with pytest.raises(GroupError, match=message):
        Mailbox(2).recv(*address)


def test_nothing_sent_raises():
    with pytest.raises(GroupError, match="rank 1 has no message from rank 0 with tag 7; send it"):
        Mailbox(2).recv(0, 1, 7)
    with pytest.raises(GroupError, match="0 ranks"):
        Mailbox(0)
