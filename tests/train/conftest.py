import pytest


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Leaves the plot of a run empty: to draw it takes a third of a second.

    `full` tests draw it, and so do the runs in processes of their own.
    """
    if request.node.get_closest_marker("full") is None:
        empty = lambda path, *curves: path.write_bytes(b"")
        monkeypatch.setattr("axon_dist.train.app.training.plot_losses", empty)
