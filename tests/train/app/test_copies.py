"""A run resumes from copies in memory; copies that nothing would keep raise an error."""

import functools
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.checkpoint import CheckpointManager, HostCopies, Retention
from axon_dist.checkpoint.manager import ranked
from axon_dist.core.errors import CheckpointError, ConfigError
from axon_dist.train.app import runs, train
from axon_dist.train.app.resume import SavedStates, check_copies
from axon_dist.train.app.runs import build_run, compiling_ahead, world_of_first
from axon_dist.train.config import RunConfig

CONFIG = {
    "devices": {"emulate": 2},
    "model": {"width": 8, "num_layers": 1, "num_heads": 2, "ffn_width": 8, "max_length": 16},
    "train": {"steps": 6, "global_batch": 8, "eval_every": 0, "eval_batches": 1, "log_every": 1},
    "checkpoint": {"every": 0, "memory_every": 2},
}


@pytest.fixture
def config(tmp_path):
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in texts:
        path.write_text(f"{path.name}: the quick brown fox jumps over a lazy dog. " * 99)
    files = {"files": [str(texts[0])], "validation_files": [str(texts[1])]}
    data = files | {"sequence_length": 16}
    return lambda name, **train: RunConfig.from_dict(
        CONFIG
        | {"data": data, "run_dir": str(tmp_path / name), "train": CONFIG["train"] | train}
    )  # fmt: skip


def losses(done):
    return [loss for _, loss in done.result.train_curve]


@pytest.mark.full
def test_a_run_goes_on_from_its_copies_and_reads_no_checkpoint(config, tmp_path, monkeypatch):
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("AXON_MEMORY", str(memory))
    whole = train(config("whole"), resume="auto")
    for path in memory.iterdir():
        path.unlink()

    def die(step, metrics):
        if step == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(
        "axon_dist.train.loop.JsonlWriter.write", lambda self, step, row: die(step, row)
    )
    with pytest.raises(KeyboardInterrupt):
        train(config("cut"), resume="auto")
    monkeypatch.undo()
    monkeypatch.setenv("AXON_MEMORY", str(memory))
    assert not list((tmp_path / "cut" / "checkpoints").glob("step_*"))
    assert [path.name[:13] for path in memory.glob("*.copy")] == ["step_00000004"]
    rest = train(config("cut"), resume="auto")
    assert losses(rest) == losses(whole)[4:]
    assert rest.result.first_step == 4


@pytest.mark.full
def test_a_checkpoint_that_is_newer_than_the_copies_is_taken(config, tmp_path, monkeypatch):
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("AXON_MEMORY", str(memory))
    train(config("run", steps=3), resume="auto")
    # The last state is saved but not copied: step 3 is on disk, step 2 in memory.
    assert [path.name[:13] for path in memory.glob("*.copy")] == ["step_00000002"]
    assert train(config("run"), resume="auto").result.first_step == 3


def saved_states(folder, memory, target, told=None):
    """The saved states of a run whose state is an array, in its only form."""
    form = mock.Mock(target=target, from_canonical=lambda x: x, to_canonical=lambda x: x)
    run = mock.Mock()
    run.loader.state.return_value = {}
    checkpoints = CheckpointManager(folder, Retention(last=9), background=False)
    tell = print if told is None else told.append
    return SavedStates(run, form, checkpoints, HostCopies(memory, tell), mock.Mock(address=None))


@pytest.fixture
def folders(tmp_path):
    """A folder of checkpoints of the steps 2, 4 and 6, of which 6 is damaged, and one of copies."""
    memory, folder = tmp_path / "memory", tmp_path / "checkpoints"
    memory.mkdir()
    with CheckpointManager(folder, Retention(last=9)) as manager:
        for step, score in {2: 0.5, 4: 0.2, 6: 0.1}.items():
            manager.save(step, {"w": jnp.full(2, step)}, score=score, meta={"data": {}})
    for path in (folder / "step_00000006" / "arrays").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    return folder, memory


def test_a_copy_tells_which_checkpoints_were_given_up(folders):
    """The run goes back from the damaged checkpoint, is copied and killed before the next save."""
    folder, memory = folders
    target = {"w": jnp.zeros(2, int)}
    first = saved_states(folder, memory, target)
    first.start = folder / "step_00000006"
    assert first.checkpoints.restore_newest(target).step == 4
    first.copy({"w": jnp.full(2, 7)}, 7)
    again = saved_states(folder, memory, target)
    assert again.find_start("auto", print)["w"].tolist() == [7, 7]
    assert again.start == folder / "step_00000004"
    again.checkpoints.save(8, {"w": jnp.full(2, 8)}, score=0.9)
    assert [entry.step for entry in ranked(again.checkpoints.entries())] == [4, 2, 8]


def test_a_state_that_is_saved_after_its_copy_is_followed_from_the_copy(tmp_path):
    """A run that is told to stop between two checkpoints copies its last state, then saves it."""
    target, memory = {"w": jnp.zeros(2, int)}, tmp_path / "memory"
    memory.mkdir()
    first = saved_states(tmp_path / "run", memory, target)
    for step, score in {1: 0.5, 5: 0.3}.items():
        first.checkpoints.save(step, {"w": jnp.full(2, step)}, score=score)
    first.copy({"w": jnp.full(2, 7)}, 7)
    first.checkpoints.save(7, {"w": jnp.full(2, 7)}, meta={"step": 7}, score=0.1)
    again = saved_states(tmp_path / "run", memory, target)
    assert again.find_start("auto", print)["w"].tolist() == [7, 7]
    assert again.start == tmp_path / "run" / "step_00000007"
    assert again.is_saved(7)
    again.checkpoints.save(10, {"w": jnp.full(2, 10)}, score=0.9)
    assert [entry.step for entry in ranked(again.checkpoints.entries())] == [7, 5, 1, 10]


def test_a_copy_of_a_run_that_began_elsewhere_tells_where(folders, tmp_path):
    folder, memory = folders
    target = {"w": jnp.zeros(2, int)}
    first = saved_states(tmp_path / "fork", memory, target)
    first.start = folder / "step_00000004"
    first.checkpoints.begin_at(first.start)
    first.copy({"w": jnp.full(2, 7)}, 7)
    again = saved_states(tmp_path / "fork", memory, target)
    assert again.find_start("auto", print) is not None
    assert again.start == folder / "step_00000004"


def test_a_copy_that_does_not_fit_leaves_the_run_to_its_checkpoint(folders):
    folder, memory = folders
    first = saved_states(folder, memory, {"w": jnp.zeros(2, int)})
    first.copy({"w": jnp.zeros(2, int), "averages": jnp.zeros(3)}, 7)
    told = []
    again = saved_states(folder, memory, {"w": jnp.zeros(2, int)}, told)
    again.form.from_canonical = lambda x: mock.Mock(step=4, **x)
    with mock.patch("axon_dist.train.app.resume.changes_around", return_value=[]):
        assert again.find_start("auto", told.append).w.tolist() == [4, 4]
    assert any("copy of step 7" in text and "checkpoint" in text for text in told), told


def test_a_copy_that_does_not_fit_is_not_given_up_for_a_new_state(tmp_path):
    target, memory = {"w": jnp.zeros(2, int)}, tmp_path / "memory"
    memory.mkdir()
    first = saved_states(tmp_path / "run", memory, target)
    first.copy({"w": jnp.zeros(2, int)}, 50)
    wider = {**target, "averages": jnp.zeros(3)}
    with pytest.raises(CheckpointError, match="copy of step 50"):
        saved_states(tmp_path / "run", memory, wider).find_start("auto", print)
    again = saved_states(tmp_path / "run", memory, target)
    assert again.find_start("auto", print) is not None


@pytest.mark.parametrize("resume", ["auto", "path"])
def test_a_resumed_run_finds_once_what_its_checkpoint_continues(folders, tmp_path, resume):
    folder, memory = folders
    states = saved_states(folder, memory, {"w": jnp.zeros(2, int)})
    states.form.from_canonical = lambda x: mock.Mock(step=4, **x)
    path = "auto" if resume == "auto" else str(folder / "step_00000004")
    finds = mock.Mock(wraps=states.checkpoints._lineage_at)
    states.checkpoints._lineage_at = finds
    with mock.patch("axon_dist.train.app.resume.changes_around", return_value=[]):
        states.find_start(path, print)
    finds.assert_called_once_with(folder / "step_00000004")
    assert states.checkpoints.lineage == [(0, 1)]


def test_copies_that_nobody_keeps_are_refused(config, tmp_path):
    asked = config("run")
    with pytest.raises(
        ConfigError, match=r"memory_every: got 2, but nothing keeps.*launch.*--hosts"
    ):
        check_copies(asked, {}, "auto")
    with pytest.raises(ConfigError, match="which is not a folder"):
        check_copies(asked, {"AXON_MEMORY": str(tmp_path / "gone")}, "auto")
    memory = {"AXON_MEMORY": str(tmp_path)}
    with pytest.raises(ConfigError, match="only with --resume auto; add it"):
        check_copies(asked, memory, None)
    nowhere = RunConfig.from_dict({"checkpoint": {"memory_every": 2}})
    with pytest.raises(ConfigError, match="only with a run_dir; add it"):
        check_copies(nowhere, memory, "auto")
    check_copies(asked, memory, "auto")
    check_copies(RunConfig(), {}, None)


def test_nothing_is_compiled_ahead_where_nothing_can_be_lost(config, monkeypatch):
    monkeypatch.setattr(
        "axon_dist.train.app.runs._compile_ahead", lambda *given: pytest.fail("compiled")
    )
    run = build_run(config("run"))
    with compiling_ahead(run.config, run.world, {"AXON_ELASTIC": "1"}, print) as begin:
        begin()
    assert np.array_equal(
        world_of_first(run.config, run.world, 1).mesh.devices, run.world.mesh.devices
    )


def test_programs_compiled_ahead_are_for_the_largest_possible_restart(monkeypatch):
    def step_for(can, config, count):
        if count not in can:
            raise ConfigError(f"{count} do not divide")
        return steps[count], ""

    steps, told, world = mock.MagicMock(), [], mock.Mock(num_processes=8)
    monkeypatch.setattr(runs, "world_of_first", lambda config, world, count: count)
    monkeypatch.setattr(runs, "abstract_batch", lambda config: None)
    for can in ({7}, {4, 2}, set()):
        monkeypatch.setattr(runs, "step_for", functools.partial(step_for, can))
        runs._compile_ahead(RunConfig(), world, told.append)
    assert [call.args for call in steps.__getitem__.call_args_list] == [(7,), (4,)]
    assert told == [
        "if one process is lost, only 4 can continue: 7 do not divide",
        "if one process is lost, the others cannot continue: 7 do not divide",
    ]
