"""Two processes that were given different things end soon, and say who has what."""

import pathlib

import pytest

from axon_dist.mesh.agreement import differences

WORKER = str(pathlib.Path(__file__).with_name("agreement_worker.py"))

API = {
    "factory": "factory of the model",
    "module": "process 1 has kernel=",
    "rate": "about 'step': process 1 has program=",
    "options": "process 1 has num_steps=3 where process 0 has num_steps=2",
}
CONFIG = {
    "optimizer.learning_rate": ("optimizer.learning_rate=0.5", "=0.5 where"),
    "train.steps": ("train.steps=7", "train.steps="),
    "seed": ("seed=1", "seed="),
    "data.contents": ("data.files=[{folder}/1/*.txt]", "data.contents="),
}
FULL = {"factory", "module", "options", "optimizer.learning_rate", "train.steps", "seed"}


def marked(cases):
    return [
        pytest.param(case, marks=[pytest.mark.slow] if case in FULL else [], id=case)
        for case in cases
    ]


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", marked(API))
def test_programs(start, kind):
    processes = start(2, WORKER, kind)
    assert all(processes.wait((0, 1), timeout=120))
    for rank in (0, 1):
        assert "the processes disagree about" in processes.text(rank)
        assert API[kind] in processes.text(rank)


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.parametrize("key", marked(CONFIG))
def test_configs(start, tmp_path, key):
    for number, letters in enumerate("ab"):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in range(20):
            (folder / f"{name}.txt").write_text(letters * 500)
    option, words = CONFIG[key]
    option = option.format(folder=tmp_path)
    processes = start(2, WORKER, "config", option, str(tmp_path))
    assert all(processes.wait((0, 1), timeout=120))
    for rank in (0, 1):
        assert "process 1 has" in processes.text(rank)
        assert key in processes.text(rank)
        assert words in processes.text(rank)


@pytest.mark.full
@pytest.mark.multiprocess
def test_parameters_are_those_of_process_0_after_they_were_synchronised(start):
    processes = start(2, WORKER, "sync")
    assert processes.wait((0, 1), timeout=120) == [0, 0]
    assert "kernel is that of process 0" in processes.text(1)


@pytest.mark.full
@pytest.mark.multiprocess
def test_a_folder_of_checkpoints_that_each_host_has_for_itself_is_refused(start, tmp_path):
    (tmp_path / "0").mkdir()
    for name in range(20):
        (tmp_path / "0" / f"{name}.txt").write_text("a" * 500)
    processes = start(2, WORKER, "folders", str(tmp_path))
    assert processes.wait((0, 1), timeout=120) == [0, 0]
    for rank in (0, 1):
        lines = [x for x in processes.text(rank).splitlines() if "is not one folder" in x]
        keys = ("the folder of the checkpoint", "the folder of checkpoints")
        for line, key in zip(lines, (*keys, "run_dir", "checkpoint.dir"), strict=True):
            # Process 1 calls another folder so, and also learns which one is meant.
            assert line.startswith(f"folder-not-shared {key}: '{tmp_path}/0/own' is not one folder")
            assert "is not seen by process 1 (host " in line
    # No file of a check is left.
    assert not [*tmp_path.rglob(".*.axon.tmp")]


def test_shards_that_only_one_process_has_are_no_difference():
    facts = {0: {"w[0:2]": "a", "b": "c"}, 1: {"w[2:4]": "d", "b": "c"}}
    assert differences(facts) == []
    facts[1]["b"] = "e"
    assert differences(facts) == ['process 1 has b="e" where process 0 has b="c"']
