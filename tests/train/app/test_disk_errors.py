"""Disk errors: a run continues or ends with a message, and no saved data is lost."""

import errno
import os

import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.core.files import as_place, make_folder, open_regular, replace_text, replacing
from axon_dist.train.app.directory import RunDirectory, _newest_run
from axon_dist.train.config import RunConfig
from axon_dist.train.loop import JsonlWriter
from axon_dist.train.loop.writers import TolerantWriter
from benchmarks.disk_errors import measure_errors
from benchmarks.links import NAMES, WAYS, problem_of


@pytest.mark.parametrize("every", [96, pytest.param(8, marks=pytest.mark.full)])
def test_every_operation_may_fail(tmp_path, every):
    for row, count, good in measure_errors(tmp_path, every):
        assert (row, good) == (row, count)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name",
    [
        x
        if x in ("metrics.jsonl", "report.html", "checkpoints")
        else pytest.param(x, marks=pytest.mark.full)
        for x in NAMES
    ],
)
def test_links_and_pipes_in_the_folder_of_a_run(tmp_path, name, way):
    assert problem_of(tmp_path / "run", name, way) is None


def test_lines_wait_for_space_on_the_disk(tmp_path, monkeypatch):
    """A partially written line is completed."""
    told, write, left = [], os.write, [7]

    def refuse(descriptor, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        part, left[0] = bytes(data)[: left[0]], max(0, left[0] - len(data))
        return write(descriptor, part)

    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path, told.append)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        writer.write(1, {"a": 1.0})
        writer.write(2, {"a": 2.0})
    assert path.read_text() == '{"step"'
    writer.write(3, {"a": 3.0})
    writer.close()
    assert path.read_text().splitlines() == [f'{{"step": {n}, "a": {n}.0}}' for n in (1, 2, 3)]
    assert told == [
        "metrics.jsonl: lines cannot be written yet (No space left on device); the run continues"
    ]


def test_lines_that_are_lost_are_counted(tmp_path, monkeypatch):
    told = []
    writer = JsonlWriter(tmp_path / "metrics.jsonl", told.append)

    def refuse(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        writer.write(1, {"a": 1.0})
        writer.write(2, {"a": 2.0})
        writer.close()
    assert told[1:] == ["metrics.jsonl: 2 lines could not be written and are lost"]


def test_a_tracker_that_fails_ends_no_run():
    class Broken:
        def write(self, step, metrics):
            raise RuntimeError("no network")

        def close(self):
            raise RuntimeError("no network")

    told = []
    writer = TolerantWriter(Broken(), "Wandb", told.append)
    writer.write(1, {})
    writer.write(2, {})
    writer.close()
    assert told == ["Wandb: metrics are lost (RuntimeError: no network); the run continues"]


def test_a_link_is_replaced_and_not_followed(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (tmp_path / "link").symlink_to(mine)
    os.link(mine, tmp_path / "hard")
    with replacing(tmp_path / "link") as file:
        file.write(b"new")
    assert mine.read_text() == "precious"
    assert (tmp_path / "link").read_text() == "new"
    assert not (tmp_path / "link").is_symlink()
    with pytest.raises(OSError, match="hard link"):
        open_regular(tmp_path / "hard", os.O_WRONLY)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hard", "link", "mine"]


def test_files_are_written_to_a_folder_that_is_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    replace_text(tmp_path / "link" / "a.txt", "whole")
    make_folder(tmp_path / "link" / "inner" / "folder")
    assert (tmp_path / "disk" / "a.txt").read_text() == "whole"
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["a.txt", "inner"]


def test_metrics_are_not_added_to_what_a_link_leads_to(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="is a link, which is not followed"):
        JsonlWriter(tmp_path / "metrics.jsonl")


def test_a_run_in_a_folder_that_is_not_in_the_encoding_of_file_names_is_refused(tmp_path):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    with pytest.raises(ConfigError, match=r"run_dir: got '.*caf\\udce9', which is not in the enc"):
        as_place(odd, "run_dir")
    assert as_place(odd, "data.files", any_name=True).name == "caf\udce9"


def test_metrics_that_are_a_hard_link_become_a_file_of_the_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    os.link(tmp_path / "metrics.jsonl", tmp_path / "run" / "metrics.jsonl")
    directory = RunDirectory(tmp_path / "run")
    directory.take_metrics(1, lambda text: None)
    writer = JsonlWriter(directory.metrics)
    writer.write(2, {})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert len(directory.metrics.read_text().splitlines()) == 2


def test_the_newest_run_of_a_config_with_checkpoints_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tiny-20260101-000000", "tiny-20260102-000000"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text("name: tiny\n")
    (tmp_path / "runs" / "tiny-20260101-000000" / "checkpoints").mkdir()
    data = {"name": "tiny", "run_dir": None}
    assert _newest_run(RunConfig.from_dict(data)).name == "tiny-20260101-000000"
    elsewhere = RunConfig.from_dict(data | {"checkpoint": {"dir": "kept"}})
    assert _newest_run(elsewhere).name == "tiny-20260102-000000"
