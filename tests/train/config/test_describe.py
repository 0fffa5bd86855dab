import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.parallel import STRATEGIES
from axon_dist.train.cli.main import main
from axon_dist.train.config import describe, to_markdown, to_text

KEYS = [key for section in describe() for key in section.keys]


def test_every_key_has_a_meaning_and_a_type():
    assert [key.path for key in KEYS if not key.meaning] == []
    assert [section.path for section in describe() if not section.meaning] == []
    assert len(KEYS) > 200


def test_keys_typed_as_dtypes_are_dtypes():
    dtypes = {key.path.rpartition(".")[2] for key in KEYS if key.type == "name of a dtype"}
    assert dtypes == {"param", "compute", "reduce", "buffer", "output", "dtype", "reduce_dtype"}


def test_every_strategy_and_variant_is_there():
    paths = {(section.path, section.variant) for section in describe()}
    assert {(f"parallel.{name}", "") for name in STRATEGIES} <= paths
    assert {("optimizer", "name: sgd"), ("model", "kind: vit"), ("data", "kind: jsonl")} <= paths
    assert ("model", "factory: package.module:name") in paths


@pytest.mark.parametrize(
    ("path", "type", "default"),
    [
        ("train.steps", "whole number, at least 1", "1000"),
        ("train.clip_norm", "number, at least 1e-37, or null", "1.0"),
        ("train.nonfinite", "stop, skip or rollback", "stop"),
        (
            "optimizer.schedule",
            "section with name: cosine, linear, constant, wsd or inverse_sqrt",
            "cosine",
        ),
        ("parallel.pipeline.num_microbatches", "whole number", ""),
        ("mesh", "dp=4,tp=2 or {dp: 4, tp: 2}", "{dp: -1}"),
        ("trainable", "list of string", "[]"),
    ],
)
def test_types_and_defaults(path, type, default):
    found = next(key for key in KEYS if key.path == path)
    assert (found.type, found.default) == (type, default)


def test_a_section_a_key_and_a_mistake(capsys):
    assert {row.path for row in describe("optimizer", nested=False)} == {"optimizer"}
    assert {row.path for row in describe("optimizer")} == {
        "optimizer", "optimizer.schedule", "optimizer.groups",
    }  # fmt: skip
    assert len(describe(nested=False)) == 1
    assert [row.variant for row in describe("data.jsonl")] == ["kind: jsonl"]
    assert [row.meaning for row in describe("validation")] == ["a key of the top level."]
    ((key,),) = (row.keys for row in describe("train.ema"))
    assert key.path == "train.ema"
    with pytest.raises(ConfigError, match=r"no section or key 'trian'. Did you mean 'train'\?"):
        describe("trian")
    assert main(["config", "train"]) == 0
    assert "  train.steps = 1000  (whole number, at least 1)\n" in capsys.readouterr().out


def test_as_text_and_as_tables():
    found = describe("train")
    assert to_text(found).count("train.steps") == 1
    assert (
        "| `train.steps` | whole number, at least 1 | `1000` | optimizer steps. |"
        in to_markdown(found)
    )


def test_tables_show_braces_and_brackets():
    table = to_markdown(describe(""))
    assert "| `mesh` | dp=4,tp=2 or &#123;dp: 4, tp: 2} | `{dp: -1}` |" in table
    assert "`runs/<name>-<time>`" in table
    assert "&lt;name" not in table
