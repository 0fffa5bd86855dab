import sys

import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.train.loop import has_module, plot_losses


@pytest.mark.skipif(not has_module("matplotlib"), reason="needs the extra 'plots'")
@pytest.mark.parametrize("validation", [[], [(5, 2.5), (10, 2.0)]])
def test_draws_a_png(tmp_path, validation):
    path = tmp_path / "loss.png"
    plot_losses(path, [(1, 5.0), (10, 2.0)], validation, "nats/byte", "a run")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"the loss plot needs .* pip install -e '.*\[plots\]'"):
        plot_losses(tmp_path / "x.png", [(1, 1.0)], [], "nats", "x")
