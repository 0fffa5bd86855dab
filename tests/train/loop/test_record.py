"""The curves that a run records."""

from axon_dist.train.loop.record import TRAIN, VALIDATION, _Curves


def test_curves_by_kind_and_name_and_what_going_back_drops():
    curves = _Curves()
    for step in (10, 20, 30):
        curves.add(TRAIN, step, {"loss": step / 10, "accuracy": 1.0})
    curves.add(VALIDATION, 30, {"perplexity": 5.0})
    assert curves.curve(TRAIN, "loss") == ((10, 1.0), (20, 2.0), (30, 3.0))
    assert curves.last(TRAIN, "loss") == (30, 3.0)
    assert curves.names(VALIDATION) == ["perplexity"]
    curves.drop_after(20)
    assert curves.last(TRAIN, "loss") == (20, 2.0)
    assert curves.last(VALIDATION, "perplexity") is None
    assert curves.names(VALIDATION) == []
    assert curves.curve(VALIDATION, "unknown") == ()
