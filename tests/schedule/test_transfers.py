from axon_dist.schedule import Payload, Schedule, Transfer, one_f_one_b, transfers, zero_bubble_v


def test_activations_go_down_and_gradients_up():
    assert transfers(one_f_one_b(2, 1)) == (
        Transfer(tick=0, payload=Payload.ACTIVATION, stage=1, microbatch=0, source=0, target=1),
        Transfer(tick=2, payload=Payload.GRADIENT, stage=0, microbatch=0, source=1, target=0),
    )


def test_the_weight_gradient_sends_nothing_and_the_input_gradient_does():
    sent = transfers(Schedule.from_csv("0F0,,,,0B0\n,1F0,1I0,1W0,"))
    assert [(t.tick, t.payload) for t in sent] == [(0, "activation"), (2, "gradient")]


def test_stages_on_one_device_send_nothing():
    # Stages 1 and 2 share device 1, the turn of the V.
    pairs = {(t.stage, t.source, t.target) for t in transfers(zero_bubble_v(2, 3))}
    assert pairs == {(1, 0, 1), (3, 1, 0), (2, 0, 1), (0, 1, 0)}


def test_transfers_come_in_the_order_of_ticks():
    ticks = [transfer.tick for transfer in transfers(one_f_one_b(4, 8))]
    assert ticks == sorted(ticks)
    assert len(ticks) == 2 * 3 * 8
