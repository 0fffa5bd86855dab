import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_dist.core.errors import ConfigError
from axon_dist.core.plain_yaml import apply_override, read_yaml, sections_of, to_yaml
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
        ("name.first=x", r"the key before 'first' holds 'run', not a section; replace the"),
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


def test_values_are_those_of_yaml_1_2(tmp_path):
    """Words such as `on` are strings, `010` is ten, and an exponent needs no point."""
    path = tmp_path / "run.yaml"
    path.write_text("a: [on, off, yes, 1:30]\nb: -010\nc: 1e-3\nd: 0o10\n")
    want = {"a": ["on", "off", "yes", "1:30"], "b": -10, "c": 0.001, "d": 8}
    assert read_yaml(path) == want
    assert sections_of(to_yaml(want), "the text") == want


def values(text):
    """Numbers, words and texts of such characters, in lists and sections in each other."""
    return st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(text, max_size=8)
        | st.floats(allow_nan=False),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(st.text(text), inner, max_size=3),
        max_leaves=12,
    )  # fmt: skip


def is_read_back(value):
    return sections_of(to_yaml({"value": value}), "the text") == {"value": value}


@given(values("ant01e.+-_ :#,?!&*%@|>~=<'\"`\\/{}[]\n\r\t\0\x85\u2028\ufeffé日😀"))
def test_written_values_are_read_back(value):
    """With the characters that YAML gives a meaning, and some of those that it does not print."""
    assert is_read_back(value)


# Hypothesis takes seconds to list all characters.
@pytest.mark.full
@given(values(st.characters()))
def test_written_values_of_all_characters_are_read_back(value):
    assert is_read_back(value)


def test_a_directive_of_the_version_of_yaml_is_read(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("%YAML 1.2\n---\nname: on\n")
    assert read_yaml(path) == {"name": "on"}
