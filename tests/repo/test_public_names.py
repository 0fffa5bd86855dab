"""Names that programs import stay where they were, wherever the code behind them moves."""

import importlib
import pathlib

import pytest

NAMES = pathlib.Path(__file__).with_name("public_names.txt").read_text().splitlines()
PLACES = sorted({line.split()[0] for line in NAMES})


@pytest.mark.parametrize("place", PLACES)
def test_every_public_name_is_found(place):
    module = importlib.import_module(place)
    names = [name for where, name in map(str.split, NAMES) if where == place]
    assert names
    assert [name for name in names if not hasattr(module, name)] == []


def test_a_name_that_never_was_is_not_found():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        getattr(importlib.import_module("axon_dist.config"), "tri" + "an")
