"""`axon verify`: its table, its exit code, and the config made tiny for the present devices."""

import pytest
import yaml

from axon_dist.step import gather
from axon_dist.train.app import tiny
from axon_dist.train.app.verify import Difference, Verification
from axon_dist.train.cli import runs
from axon_dist.train.cli.main import main
from axon_dist.train.config import load_config
from axon_dist.train.config.schema import RunConfig


@pytest.fixture
def path(tiny, tmp_path):
    file = tmp_path / "tiny.yaml"
    train = tiny["train"] | {"accumulate": 2, "global_batch": 64}
    file.write_text(yaml.safe_dump(tiny | {"train": train}))
    return str(file)


@pytest.mark.full
def test_says_what_it_compared(path, capsys):
    assert main(["verify", path, "--steps", "1", "train.global_batch=16"]) == 0
    text = capsys.readouterr().out
    assert "ddp on dp=8 against one device" in text
    assert "loss of step 0" in text
    assert "equal within 1e-05 (float32, SGD, 1 step;" in text


@pytest.mark.full
def test_here_takes_two_tiny_steps_on_the_devices_that_there_are(path, capsys, monkeypatch):
    monkeypatch.setattr("axon_dist.mesh.World.emulate", None)
    assert main(["verify", path, "--here", "model.num_layers=5"]) == 0
    text = capsys.readouterr().out
    assert "loss of step 1" in text
    assert "loss of step 2" not in text
    assert "blocks/1" in text
    assert "blocks/2" not in text


@pytest.mark.full
def test_a_difference_is_exit_code_1(path, capsys, monkeypatch):
    wrong = lambda x, *rest: 1.001 * reduce_by(x, *rest)
    reduce_by = gather.reduce_by
    monkeypatch.setattr(gather, "reduce_by", wrong)
    two = ["mesh=dp=2", "devices.emulate=2", "train.global_batch=16"]
    assert main(["verify", path, "--steps", "2", *two]) == 1
    text = capsys.readouterr().out
    assert "NOT equal within" in text
    # With gradients clipped to length 1, the parameters would be right.
    assert "grad_norm of step 0" in text


@pytest.mark.parametrize(
    ("num_failing", "said"),
    [(1, "2 more parameters are equal)"), (10, "11 more parameters are not shown, of which 2 ")],
)
def test_rows_that_fail_come_before_those_that_rounding_explains(
    num_failing, said, path, capsys, monkeypatch
):
    explained = [Difference(f"near {n}", 1e-3, rounding=1e-3) for n in range(9)]
    failing = [Difference(f"far {n}", 2e-5) for n in range(num_failing)]
    found = Verification("ddp", "dp=8", (), (*explained, *failing), 1e-5)
    monkeypatch.setattr(runs, "verify", lambda config, steps: found)
    assert main(["verify", path]) == 1
    text = capsys.readouterr().out
    assert text.count("far ") == min(num_failing, 8)
    assert said in " ".join(text.split())


def test_tiny_keeps_what_the_mesh_needs():
    config = load_config("configs/pp4_interleaved.yaml")
    small = tiny(config)
    microbatches = config.parallel["pipeline"]["num_microbatches"]
    assert small.model.num_layers == min(config.model.num_layers, 8)
    assert small.train.global_batch == min(config.train.global_batch, 4 * microbatches)
    assert small.devices.emulate is None
    assert small.model.width == config.model.width
    long = RunConfig.from_dict(
        {"mesh": "cp=2", "model": {"max_length": 4096}, "data": {"sequence_length": 4096}}
    )
    assert tiny(long).data.sequence_length == 128


def test_emulated_devices_are_advised_without_here_alone(capsys):
    """`--here` ignores emulated devices, so the message advises to leave it out."""
    assert main(["verify", "configs/fsdp8.yaml", "--here", "mesh=fsdp=3"]) == 2
    said = capsys.readouterr().err
    assert "needs 3 devices and got" in said
    assert "devices.emulate=3" in said
    assert said.strip().endswith("leave out --here to emulate devices")
