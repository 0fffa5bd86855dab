import pathlib

import pytest
import yaml

from axon_dist.cli.main import main

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def out_of(capsys, *arguments, code=0):
    assert main(["plan", *arguments]) == code
    return capsys.readouterr().out


def test_a_size_on_some_devices(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = out_of(capsys, "--params", "10e9", "--devices", "8", "--memory", "80GB")
    assert text.startswith("10B parameters, 1024 samples of 2048 tokens per step, 8 devices")
    assert "full_shard: " in text
    assert "…" not in text
    lines = yaml.safe_load(text.split("Lines of a config:\n")[1])
    assert lines["mesh"] == {"fsdp": 8}
    assert lines["parallel"] == {"full_shard": {}}


def test_a_config_on_a_target(capsys):
    config = str(CONFIGS / "fsdp8.yaml")
    text = out_of(capsys, config, "train.global_batch=64", "--target", "h100:8")
    assert "64 samples of 128 tokens" in text
    assert "rates of h100" in text


def test_what_does_not_fit_is_exit_code_1(capsys):
    text = out_of(capsys, "--params", "70B", "--devices", "8", "--memory", "80GB", code=1)
    assert "does not fit: split over all 8 devices" in " ".join(text.split())
    assert "Lines of a config" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--params", "7e9"], "plan needs either --target, such as h100:8, or --devices"),
        (["--devices", "8"], "plan needs either a config or --params"),
        (["--params", "7e9", "--target", "h10:8"], "no rates are known of 'h10'. Did you mean"),
        (["--params", "lots", "--devices", "8"], "cannot read 'lots' as a number of parameters"),
        (
            [str(CONFIGS / "zero1.yaml"), "--devices", "8", "--batch", "64"],
            "got a config together with global_batch; a config says these itself",
        ),
        (
            [str(CONFIGS / "recipes" / "resnet50_ddp8.yaml"), "--target", "h100:8"],
            "plan knows the activations of transformers on text, and resnet50_ddp8 is",
        ),
    ],
)
def test_mistakes(capsys, arguments, message):
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_names_are_those_of_configs_and_the_order_is_said(capsys):
    text = out_of(capsys, "--params", "7B", "--devices", "8", "--memory", "80GB")
    assert "Best first: what fits" in text
    assert "shard_grad_op" not in text
    lines = yaml.safe_load(text.split("Lines of a config:\n")[1])
    assert lines["parallel"] == {"zero2": {}}
