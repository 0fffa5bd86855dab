"""Random wrong configs and arguments: each is taken, or refused by an error of the library.

The default run tries a few dozen draws of one seed; `-m full` tries thousands of others.
"""

import contextlib
import copy
import decimal
import fractions
import pathlib
import random
import re
import signal
import warnings

import numpy as np
import optax
import pytest

import axon_dist
from axon_dist import planner, schedule
from axon_dist.collectives import Quantized, TopK
from axon_dist.core.errors import AxonDistError
from axon_dist.core.plain_yaml import read_yaml
from axon_dist.mesh import LaunchSpec, Timeouts, parse_target
from axon_dist.train.config import RunConfig

SECONDS = 10
CONFIGS = sorted((pathlib.Path(__file__).parents[2] / "configs").rglob("*.yaml"))
PLAIN = [
    read_yaml(path) for path in CONFIGS if "launch" not in path.parent.name
]  # configs/launch has files of schedulers

# What YAML can contain.
SCALARS = [
    None, True, False, 0, -1, 1, 3, 7, 2**31, 2**63, 10**30, 0.5, -0.5, 2.5, 1e-3, 1e308, -1e308,
    1e-320, float("nan"), float("inf"), "", " ", "8", "1e-3", "auto", "none", "dp", "dp=8", "adamw",
    "ddp", "bf16", "transformer", "text", "cosine", "a:b", ":", "größe", "الف", "a\nb", "a\0b", "(",
    "{}", "{0}", "%s", "x" * 5000, "é" * 3000,
]  # fmt: skip
VALUES = [
    *SCALARS, [], [[]], [None], [1, 2], ["dp", "dp"], ["x" * 3000], [{}], [[["a"]]], {}, {"": 1},
    {"a": None}, {"größe": [1]}, {"x" * 3000: 1}, {"a": {"b": {"c": 1}}}, list(range(2000)),
]  # fmt: skip


def sections_of(data, path=()):
    """Every section and list of plain data, with its path."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    yield path, data
    for key, value in items:
        if isinstance(value, (dict, list)):
            yield from sections_of(value, (*path, key))


def misspelled(key, draw):
    at = draw.randrange(len(key))
    return draw.choice([
        key[:at] + key[at + 1 :], key[:at] + key[at] + key[at:], key[:at] + "é" + key[at + 1 :],
        key.upper(), key + " ", key * 300, key.replace("_", "-") + "s",
    ])  # fmt: skip


def mutate(data, draw):
    """Changes plain data at one random place; returns the names of what was changed."""
    places = [(path, part) for path, part in sections_of(data) if part]
    path, part = draw.choice(places)
    key = draw.choice(list(part) if isinstance(part, dict) else list(range(len(part))))
    value = part[key]
    names = [*path, key]
    kind = draw.choice(("drop", "misspell", "replace", "replace", "list", "swap", "add", "scale"))
    if kind == "drop":
        del part[key]
    elif kind == "misspell" and isinstance(key, str) and key:
        new = misspelled(key, draw)
        part[new] = part.pop(key)
        names.append(new)
    elif kind == "list":
        part[key] = draw.choice([[value], [value, value], {"a": value}, {str(key): value}])
    elif kind == "swap":
        other_path, other = draw.choice(places)
        other_key = draw.choice(list(other) if isinstance(other, dict) else range(len(other)))
        names += [*other_path, other_key]
        part[key], other[other_key] = copy.deepcopy((other[other_key], value))
    elif kind == "add" and isinstance(part, dict):
        new = draw.choice(
            ["größe", "a\nb", "x" * 3000, "lr", "steps", "kind", "name", "hub", "preset", ""]
        )
        part[new] = copy.deepcopy(draw.choice(VALUES))
        names.append(new)
    elif kind == "scale" and isinstance(value, (int, float)):
        part[key] = draw.choice([-value, value * 10**12, value / 7, str(value), value + 1])
    else:
        part[key] = copy.deepcopy(draw.choice(VALUES))
    return names


def wrong_config(seed):
    """A shipped config with one to three changes, and the names of what was changed."""
    draw = random.Random(seed)
    data = copy.deepcopy(draw.choice(PLAIN))
    names = []
    for _ in range(draw.choice((1, 1, 2, 3))):
        names += mutate(data, draw)
    return data, names


@contextlib.contextmanager
def alarm():
    """Nothing here may take long."""

    def late(*_):
        raise TimeoutError(f"longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


PYTHONS = re.compile(r"unexpected keyword argument|required .*argument|positional argument")
"""The errors of Python about calls that it cannot make."""


def complaint(call, names=()):
    """Why the outcome of a call breaks the promise; "" if it was taken, or refused in words."""
    try:
        with alarm(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except AxonDistError as error:
        text = str(error)
        if not 15 < len(text) < 1500:
            return f"an error of {len(text)} characters: {text:.300}"
        if "\n\n" in text or (names and "\n" in text):
            return f"an error of several paragraphs: {text!r}"
        if names and not any(str(name)[:20] in text for name in names):
            return f"an error that names nothing that was changed: {text!r}"
    except TypeError as error:
        if not PYTHONS.search(str(error)):
            return repr(error)
    except Exception as error:
        return repr(error)
    return ""


def read_and_written(data):
    """Reads a config as the command does; one that is taken can be read back."""
    config = RunConfig.from_dict(data)
    assert RunConfig.from_dict(config.to_dict()) == config


def config_complaint(seed):
    data, names = wrong_config(seed)
    found = complaint(lambda: read_and_written(data), names)
    return found and f"wrong_config({seed}) = {data!r:.2000}: {found}"


def itself():
    """A list that contains itself."""
    made = []
    made.append(made)
    return made


ODD = {
    **{repr(value)[:30]: value for value in SCALARS},
    **{f"numpy {kind}": np.dtype(kind).type(2) for kind in ("int64", "int8", "float32", "bool")},
    "NaN of numpy": np.float32("nan"), "vector": np.arange(3), "number in an array": np.array(2),
    "array of texts": np.array(["dp"]), "array of objects": np.array([None]), "bytes": b"dp",
    "empty list": [], "empty tuple": (), "empty dict": {}, "empty set": set(), "list": [1, 2],
    "list of texts": ["dp", "tp"], "nested list": [[1]], "list of None": [None], "itself": itself(),
    "tuple": (2, 0.5), "pairs": (("dp", 2),), "texts": ("dp", "dp"), "dict": {"dp": 2},
    "dict of numbers": {1: 2}, "dict of None": {"dp": None}, "set": {"dp"}, "range": range(3),
    "long range": range(10**12), "iterator": iter(()), "complex": 1j, "class": int,
    "function": lambda *_: None, "object": object(), "fraction": fractions.Fraction(1, 2),
    "decimal": decimal.Decimal("NaN"), "10**400": 10**400, "slice": slice(1), "ellipsis": ...,
    "optimizer": optax.sgd(0.1), "error": ValueError("x"),
}  # fmt: skip


CALLS = {
    "MeshSpec": (axon_dist.MeshSpec, {"dp": 2, "tp": 4}),
    "MeshSpec of axes": (lambda axes: axon_dist.MeshSpec(axes), {"axes": "dp=8"}),
    "MeshSpec.resolve": (
        lambda axes, devices: axon_dist.MeshSpec(axes).resolve(devices),
        {"axes": "dp=-1,tp=2", "devices": 8},
    ),
    "World.emulate": (axon_dist.World.emulate, {"num_devices": 8, "axes": "dp=4,tp=2"}),
    "Timeouts": (Timeouts, {"launch": 3.0, "silence": 3.0, "step": 3.0}),
    "LaunchSpec": (
        LaunchSpec, {"coordinator_address": "here:1", "num_processes": 2, "process_id": 0},
    ),
    "parse_target": (parse_target, {"name": "h100:8"}),
    "ddp": (axon_dist.ddp, {
        "axes": "dp", "sync": "synchronous", "bucket_capacity": 8, "reduce_dtype": "bfloat16",
        "broadcast_buffers": True, "per": None,
    }),
    "fsdp": (axon_dist.fsdp, {
        "axes": "fsdp", "sharding_strategy": "full_shard", "cpu_offload": "none",
        "mixed_precision": "bf16", "auto_wrap_policy": None, "activation_checkpointing": None,
        "min_elements": 8, "reduction": None,
    }),
    "zero": (axon_dist.zero, {
        "stage": 2, "axes": "dp", "shard_axes": None, "mixed_precision": None, "min_elements": 8,
        "name": "mine",
    }),
    "tensor_parallel": (axon_dist.tensor_parallel, {
        "plan": {"up": "column"}, "axis": "tp", "sequence": False, "rings": False,
    }),
    "context_parallel": (axon_dist.context_parallel, {"mode": "ring", "axis": "cp"}),
    "expert_parallel": (axon_dist.expert_parallel, {
        "form": "auto", "capacity": 2.0, "axis": "ep", "experts": (("up$", -3),),
    }),
    "pipelined": (axon_dist.pipelined, {
        "num_ranks": 2, "num_microbatches": 4, "schedule": "1f1b", "chunks": None, "axis": "pp",
        "classes": (), "boundaries": None, "costs": None, "backward": "recompute",
        "split_vocabulary": False,
    }),
    "diloco": (axon_dist.diloco, {
        "axis": "nodes", "every": 2, "outer": None, "compress": "int8", "fragments": 1,
    }),
    "local_sgd": (axon_dist.local_sgd, {"axis": "nodes", "every": 2, "fragments": 1}),
    "compose": (lambda one, two: axon_dist.compose(one, two), {
        "one": axon_dist.ddp(), "two": axon_dist.context_parallel(),
    }),
    "Reduction": (axon_dist.Reduction, {
        "per": None, "sync": "synchronous", "bucket_capacity": 8, "dtype": None,
        "sync_buffers": True, "manual": False,
    }),
    "MixedPrecision": (axon_dist.MixedPrecision, {
        "param": "float32", "compute": "bfloat16", "reduce": None, "buffer": None,
        "output": "float32", "products": None, "skip": (), "gather": None,
    }),
    "MixedPrecision.of": (axon_dist.MixedPrecision.of, {"choice": "bf16"}),
    "ActivationCheckpointing": (axon_dist.ActivationCheckpointing, {
        "interval": 2, "policy": "nothing", "classes": None,
    }),
    "GradScaler": (axon_dist.GradScaler, {
        "init_scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3,
        "min_scale": 1.0,
    }),
    "SizeBasedAutoWrapPolicy": (axon_dist.SizeBasedAutoWrapPolicy, {"min_params": 8}),
    "TransformerAutoWrapPolicy": (
        lambda one: axon_dist.TransformerAutoWrapPolicy(one), {"one": "Block"},
    ),
    "GradientBucket": (axon_dist.GradientBucket, {"capacity": 8, "dtype": "float32"}),
    "GradientSynchronizer": (axon_dist.GradientSynchronizer, {
        "strategy": "no_sync", "bucket_capacity": 8,
    }),
    "Quantized": (Quantized, {"kind": "int8", "block": 8}),
    "TopK": (TopK, {"share": 0.5}),
    "muon": (axon_dist.muon, {
        "learning_rate": 0.1, "ns_steps": 2, "beta": 0.9, "eps": 1e-8, "weight_decay": 0.1,
        "mu_dtype": None, "nesterov": True, "adam_b1": 0.9, "consistent_rms": None,
    }),
    "LoopOptions": (axon_dist.LoopOptions, {
        "num_steps": 4, "log_every": 1, "eval_every": 1, "save_every": 0, "copy_every": 0,
        "items_per_step": None, "item": "tokens", "peak_flops": None, "sequence_length": 3,
        "max_rollbacks": 3, "best_metric": "validation/loss", "best_mode": "min", "patience": 0,
        "min_delta": 0.0, "profile_at": 0, "profile_steps": 3,
    }),
    "Costs": (schedule.Costs, {"f": 1.0, "stage_weights": (1.0, 2.0), "transfer": 0.0}),
    "build_schedule": (schedule.build_schedule, {
        "name": "interleaved_1f1b", "num_devices": 2, "num_microbatches": 4, "chunks": 2,
    }),
    "compare": (schedule.compare, {"num_devices": 2, "num_microbatches": 4, "chunks": 2}),
    "search": (schedule.search, {
        "num_devices": 2, "num_microbatches": 2, "costs": None, "memory": 4.0, "chunks": 1,
    }),
    "validate": (schedule.validate, {"schedule": schedule.gpipe(2, 2), "max_live": 2}),
    "simulate": (schedule.simulate, {
        "schedule": schedule.gpipe(2, 2), "costs": None, "lockstep": False,
    }),
    "draw": (schedule.draw, {
        "schedule": schedule.gpipe(2, 2), "timeline": None, "color": False, "width": 40,
    }),
    "partition": (schedule.partition, {
        "num_layers": 4, "num_stages": 2, "costs": None, "boundaries": None,
    }),
    "stage_ranges": (schedule.stage_ranges, {"boundaries": (0, 2, 4)}),
    "efficiency": (schedule.efficiency, {"num_microbatches": 4, "num_stages": 2}),
    "min_microbatches": (schedule.min_microbatches, {"num_stages": 4, "target": 0.9}),
    "pipeline_advice": (schedule.pipeline_advice, {"num_microbatches": 4, "num_stages": 2}),
    "order_to_table": (schedule.order_to_table, {
        "name": "mine", "order": [list(map(schedule.Action.parse, ("0F0", "0B0")))],
        "placement": [0], "num_microbatches": 1,
    }),
    "Candidate": (planner.Candidate, {
        "strategy": "ddp", "pp": 1, "dp": 2, "fsdp": 1, "tp": 1, "num_microbatches": 1,
        "remat": False, "schedule": "1f1b",
    }),
    "Workload": (planner.Workload, {
        "num_params": 9, "num_layers": 2, "flops": 1e9, "global_batch": 8, "num_experts": 1,
        "precision": "bf16", "activations": 3,
    }),
    "candidate_for": (planner.candidate_for, {"strategy": "fsdp", "num_ranks": 4}),
    "candidates": (lambda **given: list(planner.candidates(**given)), {
        "work": planner.Workload(num_params=9, num_layers=1, flops=1.0, global_batch=8),
        "num_devices": 8, "hardware": planner.hardware("h100"), "replicas": 1,
    }),
    "decide": (planner.decide, {"fits": True, "sequential": False, "interconnect": 1e9}),
    "effective_batch": (planner.effective_batch, {"local": 2, "dp": 4, "accum": 2}),
    "hardware": (planner.hardware, {"name": "h100"}),
    "idle_share": (planner.idle_share, {
        "schedule": "1f1b", "num_devices": 2, "num_microbatches": 4, "recomputed": 1,
    }),
    "parse_bytes": (planner.parse_bytes, {"text": "80GB"}),
    "parse_cluster": (planner.parse_cluster, {"text": "h100:8"}),
    "parse_count": (planner.parse_count, {"text": "7B"}),
    "parse_memory": (planner.parse_memory, {"text": "80GB"}),
    "scale_lr": (planner.scale_lr, {"base": 0.1, "batch": 64, "base_batch": 32, "rule": "linear"}),
    "scaling_efficiency": (planner.scaling_efficiency, {"t1": 8.0, "tn": 2.0, "n": 4}),
}  # fmt: skip
"""Functions, each with arguments that are right; some of them are replaced by `ODD`."""


def wrong_call(seed):
    """The name of a function of `CALLS`, and the names in `ODD` of the arguments it gets."""
    draw = random.Random(seed)
    name = draw.choice(list(CALLS))
    keys = list(CALLS[name][1])
    wrong = draw.sample(keys, min(len(keys), draw.choice((1, 1, 2))))
    return name, {key: draw.choice(list(ODD)) for key in wrong}


def call_complaint(seed):
    name, wrong = wrong_call(seed)
    function, right = CALLS[name]
    found = complaint(lambda: function(**right | {key: ODD[odd] for key, odd in wrong.items()}))
    return found and f"wrong_call({seed}), {name} with {wrong}: {found}"


def test_right_arguments_are_taken():
    for function, right in CALLS.values():
        function(**right)


FEW = range(20270101, 20270161)
MANY = [range(first, first + 1000) for first in range(20280000, 20284000, 1000)]


def test_a_few_wrong_configs_and_calls():
    found = [make(seed) for seed in FEW for make in (config_complaint, call_complaint)]
    assert list(filter(None, found)) == []


@pytest.mark.full
@pytest.mark.parametrize("make", [config_complaint, call_complaint])
@pytest.mark.parametrize("seeds", MANY, ids=lambda seeds: str(seeds[0]))
def test_many_wrong_configs_and_calls(make, seeds):
    found = list(filter(None, map(make, seeds)))
    assert found[:5] == []


@pytest.mark.full
@pytest.mark.parametrize("name", CALLS)
def test_each_argument_with_each_odd_value(name):
    function, right = CALLS[name]
    told = {
        (key, odd): complaint(lambda key=key, value=value: function(**right | {key: value}))
        for key in right
        for odd, value in ODD.items()
    }
    assert {case: why for case, why in told.items() if why} == {}


def test_a_broken_promise_is_seen():
    """What the fuzz must not take: a bare exception, silence about what was got, a long text."""

    def fails(error):
        raise error

    two_parts = AxonDistError("no mesh of\n\nits devices")
    assert "KeyError" in complaint(lambda: fails(KeyError("steps")))
    assert "unhashable" in complaint(lambda: fails(TypeError("unhashable type: 'list'")))
    assert "names nothing" in complaint(lambda: fails(AxonDistError("that is not right")), ["mesh"])
    assert "paragraphs" in complaint(lambda: fails(two_parts), ["mesh"])
    assert "5000 characters" in complaint(lambda: fails(AxonDistError("x" * 5000)))
    assert complaint(lambda: fails(AxonDistError("mesh: got 'x', no mesh")), ["mesh"]) == ""
    assert complaint(lambda: axon_dist.ddp(speed=3)) == ""
