"""Names that programs import stay where they were, wherever the code behind them moves."""

import ast
import importlib
import pathlib
import subprocess
import sys

import pytest

import axon_dist

NAMES = pathlib.Path(__file__).with_name("public_names.txt").read_text().splitlines()
PLACES = sorted({line.split()[0] for line in NAMES})


@pytest.mark.parametrize("place", PLACES)
def test_every_public_name_is_found(place):
    module = importlib.import_module(place)
    names = [name for where, name in map(str.split, NAMES) if where == place]
    assert names
    assert [name for name in names if not hasattr(module, name)] == []


def test_a_name_that_never_was_is_not_found():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        getattr(importlib.import_module("axon_dist.train.config"), "tri" + "an")


def test_a_name_that_has_another_now_warns():
    config = importlib.import_module("axon_dist.train.config")
    with pytest.warns(DeprecationWarning, match="SCHEDULES is called config.RATES"):
        assert getattr(config, "SCHED" + "ULES") is config.RATES


SHOWN = [
    "World",
    "MeshSpec",
    "is_main_process",
    "DDP",
    "FSDP",
    "Pipeline",
    "ddp",
    "zero",
    "fsdp",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "pipelined",
    "local_sgd",
    "diloco",
    "compose",
    "Strategy",
    "suggest_plan",
    "build_train_step",
    "TrainStep",
    "TrainState",
    "Weighted",
    "Shared",
    "per_sample",
    "linear_cross_entropy",
    "MixedPrecision",
    "GradScaler",
    "ActivationCheckpointing",
    "muon",
    "hidden_matrices",
    "lora",
    "merge_lora",
    "Trainer",
    "LoopOptions",
    "CheckpointManager",
    "save_checkpoint",
    "load_checkpoint",
    "load_weights",
    "save_weights",
    "hub_config",
    "load_model",
    "generate",
    "AxonDistError",
]
"""What most programs need, in the groups of docs/api.md."""

ALSO = [
    "StateDictType",
    "GradSyncStrategy",
    "GradientBucket",
    "GradientSynchronizer",
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_reduce_max",
    "all_reduce_mean",
    "all_reduce_min",
    "all_reduce_product",
    "all_reduce_sum",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_from",
    "gather_tensor",
    "rank",
    "reduce_scatter_mean",
    "reduce_scatter_sum",
    "scatter_tensor",
    "send_recv",
    "shift",
    "sync_gradient",
    "sync_gradients",
    "world_size",
    "linear_scores",
    "Backend",
    "ProcessGroup",
    "ColumnParallelLinear",
    "ParallelMLP",
    "ParallelMode",
    "RowParallelLinear",
    "TensorParallelAttention",
    "VocabParallelEmbedding",
    "CPUOffload",
    "DistributedDataParallel",
    "FSDPMemoryStats",
    "FullyShardedDataParallel",
    "PipelineStage",
    "Reduction",
    "ShardingStrategy",
    "SizeBasedAutoWrapPolicy",
    "TransformerAutoWrapPolicy",
    "ZeROOptimizer",
    "ZeROStage",
    "autocast",
    "PipelineMemoryStats",
    "PipelineSchedule",
]
"""What else can be imported from the top: each has its place in a room."""


def test_the_top_lists_what_most_programs_need():
    assert sorted(axon_dist.__all__) == sorted(SHOWN)
    assert dir(axon_dist) == sorted([*SHOWN, "__version__"])


@pytest.mark.parametrize("name", [*SHOWN, *ALSO])
def test_every_name_of_the_top_is_that_of_its_room(name):
    room = importlib.import_module(f"axon_dist.{axon_dist._ROOM_OF[name]}")
    assert getattr(axon_dist, name) is getattr(room, name)


def test_type_checkers_see_the_names_that_programs_find():
    tree = ast.parse(pathlib.Path(axon_dist.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname: node.module for node in block.body for alias in node.names}
    assert seen == dict(axon_dist._ROOM_OF)
    assert set(seen) == {*SHOWN, *ALSO}


@pytest.mark.full
def test_rooms_are_found_by_name():
    program = (
        "import sys, axon_dist; assert 'jax' not in sys.modules; axon_dist.parallel.ddp; "
        "from axon_dist import schedule, World; import axon_dist.mesh; "
        "assert axon_dist.mesh.World is World"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    with pytest.raises(AttributeError, match="'axon_dist' has no attribute 'Wrold'"):
        getattr(axon_dist, "Wro" + "ld")
