import os
import pathlib

import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.train.cli.main import main
from axon_dist.train.cli.values import check_output

CONFIG = pathlib.Path(__file__).parents[3] / "configs" / "pp4.yaml"


def test_a_report_without_a_place_is_a_mistake_before_the_compilation(capsys, monkeypatch):
    monkeypatch.setattr("axon_dist.train.cli.runs.examine", lambda *_: pytest.fail("was compiled"))
    assert main(["inspect", str(CONFIG), "--json", "/none/x.json"]) == 2
    message = "axon: error: --json /none/x.json: there is no folder '/none'; make it first, or "
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_what_can_be_written(tmp_path):
    check_output("--json", None)
    check_output("--json", tmp_path / "new.json")
    assert not (tmp_path / "new.json").exists()
    (tmp_path / "old.json").write_text("{}")
    check_output("--json", tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "{}"


def test_outputs_that_cannot_be_written_raise(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"^--svg .*: this is a folder; name a file in it"):
        check_output("--svg", tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"^--csv .*a.csv: this cannot be written; name another"):
        check_output("--csv", tmp_path / "a.csv")
