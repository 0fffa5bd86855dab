import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.core.plain_yaml import apply_override, read_yaml
from axon_dist.train.config import load_config


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_overrides_replace_and_add(tmp_path):
    path = write(tmp_path, "name: a\ntrain: {steps: 10, accumulate: 2}\nmesh: {dp: 8}")
    config = load_config(path, ["train.steps=20", "optimizer.name=sgd", "mesh=dp=4,tp=2"])
    assert (config.train.steps, config.train.accumulate) == (20, 2)
    assert type(config.optimizer).__name__ == "SGD"
    assert config.mesh.shape == {"dp": 4, "tp": 2}


def test_an_empty_file_is_all_defaults(tmp_path):
    assert load_config(write(tmp_path, "")).train.steps == 1000


def test_overrides_leave_the_data_alone():
    data = {"train": {"steps": 1}}
    assert apply_override(data, "train.steps=2") == {"train": {"steps": 2}}
    assert data == {"train": {"steps": 1}}


def test_merge_keys(tmp_path):
    text = """
x-rates: &rates {learning_rate: 0.5, schedule: &flat {name: constant, warmup_steps: 3}}
optimizer:
  <<: *rates
  name: sgd
  schedule: {<<: [*flat, {warmup_steps: 9}], warmup_steps: 5}
"""
    optimizer = load_config(write(tmp_path, text)).optimizer
    assert (optimizer.learning_rate, optimizer.schedule.warmup_steps) == (0.5, 5)
    assert type(optimizer.schedule).__name__ == "ConstantRate"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", r"cannot read 'train.steps'; write key.path=value"),
        ("=3", r"cannot read '=3'; write key.path=value"),
        ("a=[1", r"'a=\[1' is not YAML"),
        ("name.first=x", r"the key before 'first' holds 'run' and not a section; replace it"),
    ],
)
def test_bad_overrides(override, message):
    with pytest.raises(ConfigError, match=message):
        apply_override({"name": "run"}, override)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", r"run.yaml' is not YAML in line 1: "),
        ("- 1", r"holds \[1\]; it must be a section of keys and values"),
        ("a: 1\nb: 2\na: 3", r"is not YAML in line 3: the key 'a' occurs twice"),
        ("x: &x {a: 1, a: 2}\ny: {<<: *x}", r"is not YAML in line 1: the key 'a' occurs twice"),
        ("a: 1\nb: [x, 1:30]", r"in line 2: 1:30 is one thing in YAML 1.1 and another"),
        ("a: 'on'\nb: off", r"in line 2: off is one thing in YAML 1.1"),
        ("a: {b: -010}", r"in line 1: -010 is one thing in YAML 1.1.* or put a text in quotes"),
        (
            "y: {<<: 3}",
            r"is not YAML in line 1: expected a mapping or list of mappings for merging",
        ),
    ],
)
def test_bad_files(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_yaml(write(tmp_path, text))


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the config '.*none.yaml': No such file"):
        read_yaml(tmp_path / "none.yaml")


def test_a_binary_file(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match=r"x.yaml': it is not UTF-8 text"):
        read_yaml(path)
