"""Models, losses and optimizers of somebody's own that end, raise, or return something else.

The default run tries a function without a result, one that does not exist, and a loss per sample;
`-m full` tries the other rows.
"""

import sys

import pytest

from axon_dist.train.cli.main import main

OWN = """
import sys
import numpy as np
import jax.numpy as jnp
import optax
from flax import nnx


class Tiny(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(256, 8, rngs=rngs)
        self.head = nnx.Linear(8, 256, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.embed(tokens))


def good(rngs): return Tiny(rngs)
def none(rngs): return None
def number(rngs): return 3
def kind(rngs): return Tiny
def ends(rngs): sys.exit(0)
def drops(rngs, told):
    model = nnx.Sequential(Tiny(rngs), nnx.Dropout(0.9, deterministic=None, rngs=rngs))
    if told: model.train()
    return model
def raises(rngs): raise ValueError("no such thing")
def empty(rngs): return nnx.Module()
def alone(): return Tiny(nnx.Rngs(0))
def loss_of_none(model, batch): return None
def loss_of_zero(model, batch): return jnp.mean(model(batch["tokens"]))
def loss_of_rows(model, batch): return model(batch["tokens"]).sum(-1)
def loss_of_text(model, batch): return "low"
def loss_that_raises(model, batch): raise IndexError("no targets")
def loss_that_misses(model, batch): return batch["targets"].mean()
def loss_without_batch(model): return 0.0
def data_of_none(): return None
def data_that_raises(): raise RuntimeError("the database is gone")
def optimizer_of_none(): return None
def optimizer_that_ends(): sys.exit("no")
def optimizer_of_another_tree():
    return optax.GradientTransformation(lambda p: (), lambda u, s, p=None: ({}, s))
def data_of_wide():
    rows = [{"tokens": np.arange(17, dtype=np.int32), "x": np.float64(i)} for i in range(8)]
    return rows, rows
VALUE = 3
"""
REFUSED = [
    "model={factory: 'own_code:none'}",
    "model={factory: 'own_code:number'}",
    "model={factory: 'own_code:kind'}",
    "model={factory: 'own_code:ends'}",
    "model={factory: 'own_code:empty'}",
    "model={factory: 'own_code:alone'}",
    "model={factory: 'own_code:VALUE'}",
    "model={factory: 'own_code:Tiny.nothing'}",
    "model={factory: 'own_code:'}",
    "model={factory: ':good'}",
    "model={factory: 'own code:good'}",
    "model={factory: '..own_code:good'}",
    "model={factory: 'own_code:good', nonsense: 3}",
    "model={factory: 'own_code:good', rngs: 3}",
    "model={factory: 'own_boom:x'}",
    "model={factory: 'own_ends:x'}",
    "model={factory: 'own_syntax:x'}",
    "loss={function: 'own_code:loss_of_none'}",
    "loss={function: 'own_code:loss_of_rows'}",
    "loss={function: 'own_code:loss_of_text'}",
    "loss={function: 'own_code:loss_that_misses'}",
    "loss={function: 'own_code:loss_without_batch'}",
    "loss={function: 'own_code:loss_of_none', model: 3}",
    "data={factory: 'own_code:data_of_none'}",
    "data={factory: 'own_code:VALUE'}",
    "optimizer={factory: 'own_code:optimizer_of_none'}",
    "optimizer={factory: 'own_code:optimizer_that_ends'}",
    "optimizer={factory: 'own_code:optimizer_of_another_tree'}",
]
RAISED = {
    "model={factory: 'own_code:raises'}": "your code raised ValueError at "
    "own_code.py:27: no such thing, raised by model.factory",
    "loss={function: 'own_code:loss_that_raises'}": "your loss raised IndexError at "
    "own_code.py:34: no targets, raised by "
    "loss_fn(model, batch) for a batch of tokens: int32[8, 17]",
}


@pytest.fixture
def config(tmp_path, texts, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name, text in {
        "own_code": OWN,
        "own_boom": "raise RuntimeError('import fails')",
        "own_ends": "import sys; sys.exit(0)",
        "own_syntax": "def f(:",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    path = tmp_path / "run.yaml"
    path.write_text(
        f"run_dir: {tmp_path}/run\ndevices: {{emulate: 8}}\nmodel: {{factory: 'own_code:good'}}\n"
        f"data: {{files: [{texts}/train.txt], validation_files: [{texts}/validation.txt], "
        "sequence_length: 16}\ntrain: {steps: 6, global_batch: 8}\n"
    )
    yield path
    assert not (tmp_path / "run").exists()


@pytest.mark.sample(
    "model={factory: 'own_code:none'}",
    "model={factory: 'own_code:Tiny.nothing'}",
    "loss={function: 'own_code:loss_of_rows'}",
)
@pytest.mark.parametrize("override", REFUSED)
def test_returned_values_are_described(capsys, config, override):
    assert main(["train", str(config), "--dry-run", override]) == 2
    err = capsys.readouterr().err
    assert err.startswith("axon: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("override", RAISED)
def test_errors_name_the_function_that_raised_them(capsys, config, override):
    assert main(["train", str(config), "--dry-run", override]) == 1
    err = capsys.readouterr().err
    assert RAISED[override] in err
    assert "its traceback is in" in err
    assert err.count("\n") == 1


def test_a_run_says_what_a_batch_is_and_what_is_narrowed(capsys, config):
    loss = "loss={function: 'own_code:loss_of_zero'}"
    data = "data={factory: 'own_code:data_of_wide'}"
    assert main(["train", str(config), "--dry-run", data, loss]) == 0
    out = capsys.readouterr().out
    assert "6 steps of 8 samples, 6 epochs of 8 samples; validated every " in out
    assert "batch: tokens int32[8, 17], x float32[8]\nbatch x: float64 is taken as float32\n" in out


def test_a_layer_that_was_not_told_whether_it_trains_names_the_way_out(capsys, config):
    model = "model={{factory: 'own_code:drops', told: {}}}"
    assert main(["train", str(config), "--dry-run", model.format("false")]) == 2
    assert "argument was provided to Dropout. Say it in each layer, or call model.train() in the " \
        "function that makes the model; validation switches to model.eval() by itself" in (
        capsys.readouterr().err
    )  # fmt: skip
    assert main(["train", str(config), "--dry-run", model.format("true")]) == 0
