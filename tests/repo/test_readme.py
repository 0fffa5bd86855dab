"""The README's Python runs as written, and its commands are those of CI."""

import ast
import pathlib
import re
import shlex
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import nnx

import axon_dist
from axon_dist import World, build_train_step, parallel, wrappers
from axon_dist.core.tree import leaves_with_paths
from axon_dist.train.cli.main import VERBS, _parse
from axon_dist.train.config import RunConfig

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_python_runs(capsys):
    """Here, as pages of docs do; `test_examples.py` starts programs in processes of their own."""
    (program,) = blocks("python")
    exec(compile(program, "README", "exec"), {"__name__": "README"})
    assert capsys.readouterr().out.startswith("(64, 64) (8, 64)\n")


def test_commands_name_files_and_verbs_that_exist():
    commands = "\n".join(blocks("bash"))
    for config in re.findall(r"configs/\w+\.yaml", commands):
        assert (ROOT / config).exists(), config
    verbs = set(re.findall(r"(?<![\w/])axon (\w+)", commands)) | {"train"}
    shown = subprocess.run(
        [sys.executable, "-m", "axon_dist.train.cli", "--help"], capture_output=True, text=True
    ).stdout
    for verb in verbs:
        assert verb in shown, f"axon {verb} is not a command"


def test_commands_can_be_typed():
    lines = [line.partition("  #")[0] for line in "".join(blocks("bash")).splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("axon ")]
    assert len(commands) > 15
    for arguments in commands:
        assert _parse(arguments).verb in VERBS, arguments


def test_the_test_command_is_the_gates():
    ci = (ROOT / ".ci" / "run").read_text()
    assert '-e ".[dev]"' in README
    assert '-e ".[dev]"' in ci
    assert "-m pytest -n 2" in README
    assert "-m pytest -q -n 2" in ci


PROMISES = {
    "A step gives the losses": [
        "contracts/test_strategies.py::test_equals_one_device",
        "contracts/test_compositions.py::test_pipelines_with_context_and_tensor_parallelism",
        "contracts/test_pipelines.py::test_equals_one_device",
        "contracts/test_tensor.py::test_equals_one_device",
    ],
    "compares all strategies": ["contracts/test_strategies.py::test_equals_one_device_full"],
    "Dropout draws": ["contracts/test_draws.py::test_dropout_draws_what_one_device_draws"],
    "BatchNorm sees the samples": [
        "contracts/test_draws.py::test_statistics_of_microbatches_are_told_of",
        "contracts/test_pipelines.py::test_statistics_outside_blocks_are_told_of",
    ],
    "A loss that couples samples": [
        "contracts/test_samples.py::test_metrics_are_those_of_the_whole_batch",
        "contracts/test_samples.py::test_equals_one_device_or_says_what_couples_the_samples",
        "contracts/test_samples.py::test_a_metric_that_couples_samples_is_not_averaged",
    ],
    "A metric that is a function of sums": [
        "contracts/test_samples.py::test_metrics_are_those_of_the_whole_batch"
    ],
    "A loss whose samples have unequal weights": [
        "step/test_auxiliary_terms.py::test_terms_of_uneven_samples_are_those_of_one_device",
    ],
    "With microbatches it sees one": [
        "contracts/test_draws.py::test_statistics_of_microbatches_are_told_of"
    ],
    "SIGTERM saves": [
        "multiprocess/test_stuck.py::test_sigterm_in_the_middle_saves_at_the_same_step_everywhere"
    ],
    "A resumed run ends": [
        "train/app/test_resume.py::test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit"
    ],
    "You do not edit": ["contracts/test_strategies.py::test_equals_one_device"],
    "Linen modules work through": ["contracts/test_foreign.py::test_equals_one_device"],
    "trains models of other packages": ["foreign/test_matrix.py::test_equals_one_device"],
    "reads the compiled program": [
        "inspect/test_report.py::test_three_sources_agree_with_arithmetic",
        "inspect/test_aot.py::test_every_chip_that_can_be_planned_can_be_compiled_for",
    ],
    "It also compiles for GPUs": [
        "step/test_compiling.py::test_the_running_program_is_the_lowered_one",
        "step/test_compiling.py::test_a_chip_brings_its_own_and_the_user_comes_last",
    ],
    "is named by the others": [
        "multiprocess/test_faults.py::test_a_lost_process_is_named_by_all_others",
        "multiprocess/test_stuck.py::test_a_process_that_hangs_is_named_by_all",
        "multiprocess/test_stuck.py::test_sigterm_in_the_middle_saves_at_the_same_step_everywhere",
        "step/test_nonfinite.py::test_stopping_keeps_the_state_before_and_gives_the_batches_back",
        "train/app/test_resume.py::test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit",
    ],
    "the steps since the last copy": [
        "multiprocess/test_replicas.py::test_a_killed_replica_costs_a_few_steps_and_no_bit",
        "multiprocess/test_replicas.py::"
        "test_a_run_shrinks_onto_a_program_compiled_ahead_and_grows_again",
    ],
    "benchmarks.replicas` measure": [
        "multiprocess/test_restart.py::test_a_killed_rank_restarts_the_run"
    ],
    "one line that says what you gave": [
        "hostile/test_command.py::test_wrong_overrides_are_one_line",
        "hostile/test_command.py::test_wrong_arguments_of_the_command",
        "hostile/test_api.py::test_wrong_batches_raise_clear_errors",
    ],
}
"""The promises of the README, and for each the tests that fail if it does not hold."""


def test_every_promise_has_a_test_that_would_fail():
    section = README.partition("## What it promises")[2].partition("\n## ")[0]
    text = " ".join(section.partition("\n\n")[2].split())
    sentences = re.split(r"(?<=[a-z`)])\. (?=[A-Z`-])|(?<=\*\*) (?=\S)", text)
    promised = [one for one in sentences if not re.fullmatch(r"[-* \w,.`]*\*\*", one.strip())]
    without = [one for one in promised if not any(words in one for words in PROMISES)]
    assert not without
    for words, tests in PROMISES.items():
        assert words in text
        for test in tests:
            path, _, name = test.partition("::")
            tree = ast.parse((ROOT / "tests" / path).read_text())
            assert name in {x.name for x in tree.body if isinstance(x, ast.FunctionDef)}, test


_SECTION = README.partition("## Choosing a strategy")[2].partition("\n## ")[0]
_LINES = [line for line in _SECTION.splitlines() if line.startswith("| ")][1:]
STRATEGIES = {cells[1]: cells for cells in ([x.strip() for x in s.split("|")] for s in _LINES)}
"""The rows of the table of strategies, by what does not fit."""

ROWS = {
    "nothing": ("dp=8", "planner/test_reading.py::test_bytes_are_those_of_the_papers"),
    "optimizer state": ("dp=8", "planner/test_reading.py::test_bytes_are_those_of_the_papers"),
    "gradients": ("dp=8", "planner/test_reading.py::test_bytes_are_those_of_the_papers"),
    "parameters": ("fsdp=8", "planner/test_reading.py::test_bytes_are_those_of_the_papers"),
    "parameters, slow links between nodes": (
        "dp=2,fsdp=4",
        "planner/test_reading.py::test_bytes_are_those_of_the_papers",
    ),
    "the links between nodes, on every step": (
        "nodes=2,fsdp=4",
        "step/test_slow.py::"
        "test_inner_steps_send_nothing_over_the_axis_and_outer_steps_the_formula",
    ),
    "activations": (
        "dp=8",
        "planner/test_remat.py::test_every_row_keeps_less_and_none_multiplies_less",
    ),
    "activations of long sequences": (
        "dp=2,cp=4",
        "parallel/test_context.py::test_activations_shrink_with_the_ranks",
    ),
    "a matrix product, or a block's activations": (
        "fsdp=4,tp=2",
        "parallel/test_tensor.py::test_a_block_sums_twice_forward_and_twice_backward",
    ),
    "experts of a mixture": (
        "dp=2,ep=4",
        "parallel/test_expert.py::test_experts_of_other_models_equal_one_device_and_are_not_gathered",
    ),
    "a node's memory, over slow links": (
        "dp=2,pp=4",
        "contracts/test_pipelines.py::test_memory_does_not_grow_with_microbatches",
    ),
    "gradients and moments of a pretrained model": (
        "dp=8",
        "step/test_trainable.py::test_a_frozen_base_is_gathered_twice_and_holds_2p_over_n",
    ),
    "speed": ("dp=8", "planner/test_reading.py::test_bytes_are_those_of_the_papers"),
    "speed on Hopper and later": (
        "dp=8",
        "ops/test_fp8_aot.py::test_bytes_are_four_in_place_of_six",
    ),
}
"""The mesh that a row of the table is for, and a test that fails where its bytes are others."""


def stored(strategy, world) -> float:
    """Bytes of parameters and moments on a device, for each parameter of the model."""
    model = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
    loss = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    state = build_train_step(model, optax.adam(1e-3), loss, strategy, world).init()
    leaves = (leaf for _, leaf in leaves_with_paths(state) if leaf.ndim)
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) / 64**2


@pytest.mark.parametrize("what", STRATEGIES)
def test_a_row_of_the_table_of_strategies(what):
    """The config is one, the Python is that strategy, and stores what the row says."""
    code, written, memory = STRATEGIES[what][3:6]
    mesh, test = ROWS[what]
    path, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / "tests" / path).read_text()
    plain = {"mesh": mesh, **yaml.safe_load(written.strip("`"))}
    assert RunConfig.from_dict(plain)
    bytes_of = re.fullmatch(r"(\S.*?)(?:/([NS]))? P", memory)
    if bytes_of is None or "beside" in memory:
        ast.parse(re.match(r"`([^`]*)`", code)[1].replace("…", "..."))
        return
    axis = "fsdp" if "fsdp" in mesh else "dp"
    world = World.emulate(8, mesh)
    names = vars(parallel) | vars(wrappers) | vars(axon_dist)
    names |= {"model": nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))}
    names |= {"group": world.group(axis)}
    said = eval(f"({memory.removesuffix(' P')})", {"N": 8, "S": world.mesh.shape[axis]})
    whole_gradients = what in ("nothing", "optimizer state")
    gradients = 4 if whole_gradients else 4 / world.mesh.shape[axis]
    # A replica also counts its steps.
    found = stored(eval(code.strip("`"), names), world)
    assert np.isclose(found, said - gradients, rtol=1e-3), found
