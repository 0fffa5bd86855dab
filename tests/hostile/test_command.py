"""Invalid commands: one line, exit code 2, at once, and nothing made.

Inputs run in this process and are refused before anything is compiled. The default run tries
misspelled keys and commands, wrong types and sizes, and missing files; `-m full` tries the others.
"""

import contextlib
import io
import itertools
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest

from axon_dist.train.cli.main import main

SECONDS = 5
DEEP = "[" * 5000
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 10)}]\n"
    for old, new in itertools.pairwise("abcdefghi")
)
DIGITS = "9" * 5000

YAML = {
    "tag of a function": "seed: !!python/object/apply:os.getcwd []",
    "unknown tag": "seed: !mine 3",
    "binary": "name: !!binary aGVsbG8=",
    "tag of a truth": "seed: !!bool 7",
    "tag of a number": "seed: !!int ''",
    "tag of a date": "name: !!timestamp x",
    "set": "name: !!set {a, b}",
    "ordered": "name: !!omap [a: 1]",
    "date": "name: 2024-01-01",
    "time": "name: 2024-01-01T00:00:00Z",
    "no date": "name: 2024-13-45",
    "no time": "name: 2024-01-01T99:99:99Z",
    "long number": f"seed: {'9' * 4300}",
    "longer number": f"seed: {DIGITS}",
    "long float": f"optimizer: {{learning_rate: {DIGITS}}}",
    "65 bits": "seed: 18446744073709551616",
    "deep": f"model: {DEEP}",
    "deep sections": "a: {" * 3000,
    "bomb": BOMB,
    "itself": "x-a: &a [*a]\nmodel: *a",
    "itself merged": "x-a: &a {<<: *a}\nmodel: {<<: *a}",
    "no anchor": "seed: *none",
    "twice": "seed: 1\nseed: 2",
    "list as key": "? [a, b]\n: 1",
    "section as key": "? {a: b}\n: 1",
    "number as key": "1: 2",
    "truth as key": "train: {yes: 1}",
    "null as key": "~: 1",
    "half a letter": 'name: "\\ud800"',
    "two documents": "seed: 1\n---\nseed: 2",
    "tab": "train:\n\tsteps: 3",
    "no end": 'name: "abc',
    "directive": "%YAML 9.9\n---\nseed: 1",
    "control": "name: a\x01b",
    "list": "- 1\n- 2",
    "text": "hello",
    "merge of a number": "model: {<<: 3}",
    "minutes": "seed: 1:30",
    "on": "deterministic: on",
    "many keys": "train: {" + ", ".join(f"k{i}: 1" for i in range(1000)) + "}",
}
BYTES = {
    "not UTF-8": b"name: \xff\xfe",
    "UTF-16": "seed: 1".encode("utf-16"),
    "NUL": b"name: a\0b",
    "gzip": zlib.compress(b"seed: 1"),
    "large": b"# " + b"x" * 2**19,
}
KINDS = ("folder", "pipe", "socket", "dangling", "zero", "none", "loop")
OVERRIDES = [
    "run_dir=gs://bucket/run/../other",
    "checkpoint.dir=azure://bucket/run",
    "data.files=[ftp://host/text.txt]",
    "data.tokenizer=gs://bucket/tokenizer.json",
    "=",
    "=3",
    "train.steps",
    "train..steps=3",
    ".train.steps=3",
    "a.b.c=",
    "a." * 5000 + "a=1",
    "seed.a=1",
    "train.steps=\u0661\u0662",
    'train.clip_norm="\u0661\u0662"',
    "train.steps=1e3",
    "train.steps=1000000000000",
    "train.steps=-1",
    "train.steps=0",
    "train.steps=2.5",
    "train.steps=true",
    "train.steps=null",
    f"train.steps={DIGITS}",
    "train.global_batch=1000000000000",
    "train.global_batch=1000000000",
    "train.eval_batches=2147483647",
    "train.accumulate=2147483648",
    "train.eval_every=-1",
    "train.nonfinite=[]",
    "train.nonfinite={}",
    "train.nonfinite=explode",
    "train.clip_norm=.nan",
    "train.clip_norm=.inf",
    "train.clip_norm=0",
    "train.clip_norm=1e308",
    "train.clip_norm=[1]",
    "train.ema=1",
    "train.ema=-0.1",
    "train.ema=.nan",
    "train=3",
    "train=[]",
    "seed=-1",
    "seed=4294967296",
    "seed=abc",
    "name=",
    'name=""',
    "name=a/b",
    'name="a\\nb"',
    'name="a\\0b"',
    f"name={'x' * 300}",
    "run_dir=~nosuchuser/x",
    'run_dir="a\\0b"',
    'run_dir=""',
    f"run_dir={'x/' * 3000}",
    f"run_dir={'x' * 300}",
    "run_dir=3",
    "checkpoint.dir=~nosuchuser/x",
    'checkpoint.dir="a\\0b"',
    "checkpoint.type=half",
    "checkpoint.type=[]",
    "checkpoint.keep=0",
    "checkpoint.every=1000000000000",
    "devices.emulate=1000000000000",
    "devices.emulate=0",
    "devices.emulate=-2",
    "devices.emulate=abc",
    "mesh=",
    "mesh=dp",
    "mesh=dp=0",
    "mesh=dp=-2",
    "mesh=dp=abc",
    "mesh=dp=3,dp=3",
    "mesh=xx=3",
    "mesh={dp: 1.5}",
    "mesh={dp: null}",
    "mesh=[1, 2]",
    "mesh=3",
    "mesh=dp=-1,tp=-1",
    "mesh=dp=1000000000000",
    "model.num_layers=1000000000000",
    "model.num_layers=0",
    "model.width=1000000000000",
    "model.width=-8",
    "model.vocab_size=1000000000000",
    "model.ffn_width=1000000000000",
    "model.max_length=1000000000000",
    "model.norm_eps=.nan",
    "model.norm_eps=.inf",
    "model.rope_theta=.nan",
    "model.dropout=1",
    "model.dropout=.nan",
    "model.dtype=int32",
    "model.dtype=nonsense",
    "model.kind=[]",
    "model.kind={}",
    "model.kind=gpt5",
    "model=3",
    "model=nothing",
    "model={factory: nothing}",
    "model={factory: 'no.such.module:make'}",
    "model={factory: 'math:sqrt'}",
    "model={factory: [1]}",
    "model={factory: 'os:'}",
    "data.kind=sql",
    "data.kind={}",
    "data.files=3",
    "data.files=[3]",
    "data.files=[~nosuchuser/x]",
    'data.files=["a\\0b"]',
    "data.files=[/dev/zero]",
    "data.files=[/]",
    "data.files=['/**/*']",
    "data.files=['[']",
    'data.files=[""]',
    "data.sequence_length=0",
    "data.sequence_length=1000000000000",
    "data.validation_fraction=2",
    "data.validation_fraction=.nan",
    "data.max_bytes=0",
    "data.tokenizer=/none.json",
    "data.tokenizer=/dev/zero",
    'data.tokenizer="a\\0b"',
    "data.num_ahead=-1",
    "optimizer=adamw2",
    "optimizer=[]",
    "optimizer.learning_rate=0",
    "optimizer.learning_rate=.nan",
    "optimizer.learning_rate=1e308",
    "optimizer.learning_rate=abc",
    "optimizer.b1=1",
    "optimizer.schedule=cubic",
    "optimizer.schedule.warmup_steps=1000",
    "optimizer.schedule.warmup_steps=-1",
    "parallel=dddp",
    "parallel=[]",
    "parallel=[ddp, ddp]",
    f"parallel=[{'x' * 3000}, {'x' * 3000}]",
    f"parallel={{{'x' * 3000}: 3}}",
    f"data.{'x' * 3000}=3",
    f"mesh={{dp: {'x' * 3000}}}",
    "parallel={ddp: 3}",
    "parallel={ddp: {x: 1}}",
    "parallel={pipeline: {}}",
    "parallel={3: {}}",
    "parallel=[[ddp]]",
    "precision=int8",
    "precision=[]",
    "precision={compute: abc}",
    "remat=3",
    "remat={interval: 0}",
    "trainable=3",
    "frozen_dtype=3",
    "loss_scale={growth_factor: 0}",
    "deterministic=maybe",
    "loggers=[3]",
    "loggers=[email]",
    "loss=3",
    "loss={function: 'math:sqrt', factory: 'math:sqrt'}",
    "loss={}",
    "nonsense=1",
    "model={kind: resnet, stage_sizes: [1000000000]}",
    "optimizer={name: muon, ns_steps: 1000000000}",
    "loss_scale={init_scale: 1e308}",
    "parallel={diloco: {every: 2, lr: .nan}}",
    "parallel={diloco: {every: 2, momentum: -1}}",
    "parallel={expert: {capacity: 1e308}}",
    "train.clip_norm=1e-320",
    "model.dtype=1e-320",
    "model.norm_eps=1e-320",
    "model.experts={balance: 1e308}",
    f"train.steps={'x' * 5000}",
    "trian.steps=3",
    "\ud800=1",
    "precision={compute: float64}",
    "precision={param: float64}",
    "model.param_dtype=float64",
    "model.dtype=float64",
    "model={kind: vit, vocab_size: 3}",
    "model={kind: resnet, num_heads: 2}",
    "data={kind: mixture, sources: []}",
    "data={kind: synthetic_images, files: [x]}",
    "optimizer={name: sgd, b1: 0.9}",
    "optimizer={name: lion, b2: 1.5}",
    "optimizer.schedule={warmup_fraction: 2}",
    "optimizer.eps=-1",
    "optimizer.weight_decay=.inf",
    "parallel=[zero1, zero2]",
    "parallel={tensor: {sequence: maybe}}",
    "parallel={pipeline: {num_microbatches: 0}}",
    "parallel={diloco: {every: 0}}",
    "parallel={diloco: {every: 2, compress: zip}}",
    "parallel={ddp: {reduction: {dtype: int8}}}",
    "parallel={ddp: {reduction: {per: fortnight}}}",
    "parallel={full_shard: {axes: []}}",
    "parallel={'': {}}",
    "remat={classes: [3]}",
    "trainable=['(']",
    "lora={rank: 0}",
    "lora={rank: 2, paths: [nope]}",
    "weights={files: []}",
    "weights={files: [run.yaml], format: onnx}",
    "loss_scale={init: -1}",
    "train.accumulate=3",
    "train.global_batch=7",
    "train.seed=3",
    "train.profile={at: -1}",
    "checkpoint.memory_every=-1",
    "devices.emulate=8.0",
    "devices.emulate=1025",
    "mesh={dp: '8'}",
    "mesh={dp: true}",
    "mesh={1: 8}",
    "mesh=DP=8",
    "mesh=dp:8",
    "mesh=dp=16",
    "name=3",
    "run_dir=/proc",
    "run_dir=run.yaml",
    "run_dir=run.yaml/x",
    "seed=1.0",
    "seed=.nan",
    "deterministic=1",
    "loggers=tensorboard",
    "loggers=[{}]",
    "loggers=[null]",
    "data.tokenizer=.",
    "data.max_bytes=-1",
    "data.files=[.]",
    "data.num_ahead=1.5",
    "model.num_heads=3",
    "model.num_kv_heads=3",
    "model.head_dim=3",
    "model.experts={count: 2, per_token: 3}",
    "model.activation=swish2",
    "model.positions=alibi",
    "model.logits=some",
    "model.preset=gpt9",
]
DRY = ("train", "CONFIG", "--dry-run")
TABLE = ("schedule", "1f1b", "--stages", "4", "--microbatches", "8")
ARGUMENTS = [
    [*DRY, "run_dir=/dev/null"],
    [*DRY, "run_dir=/dev/null/x"],
    [*DRY, 'run_dir="a\\nb"'],
    [*DRY, "checkpoint.dir=run.yaml"],
    [*DRY, "mesh='dp=4,,tp=2'"],
    [*DRY, "mesh='dp=1_0'"],
    [*DRY, "mesh='dp=٤'"],
    [*DRY, "parallel={full_shard: {min_elements: -5}}"],
    [*DRY, "parallel={zero1: {min_elements: -1}}"],
    [*DRY, "parallel={full_shard: {auto_wrap_policy: {classes: [Nope]}}}", "mesh=fsdp=8"],
    [*DRY, "parallel={full_shard: {auto_wrap_policy: {min_params: -1}}}"],
    [*DRY, "parallel={full_shard: {auto_wrap_policy: {zzz: 1}}}"],
    [*DRY, "precision={compute: float8_e4m3fn}"],
    [*DRY, "train.profile={at: 1000000}"],
    [*DRY, "train.profile={}"],
    [*DRY, "loggers=[tensorboard, tensorboard]"],
    [*DRY, "lora={paths: ['(']}"],
    [*DRY, "weights.files=[/none]"],
    [*DRY, "data.num_ahead=1000000000"],
    [*DRY, "data.tokenizer=''"],
    ["data", "check", "CONFIG", "--seconds", "1e308"],
    ["verify", "CONFIG", "--steps", "1000000000000"],
    ["tune", "CONFIG", "--rounds", "x"],
    ["tune", "CONFIG", "--json", ""],
    ["schedule", "--search", "--stages", "4", "--microbatches", "10000", "--memory", "1"],
    ["schedule", "--compare", "--stages", "64", "--microbatches", "512"],
    ["launch", "-n", "1", "--master-addr", "", "--", "true"],
    ["launch", "-n", "1", "--master-addr", "a b", "--", "true"],
    ["report", ""],
    ["report", ".", "--compare", "/none"],
    ["report", ".", "--out", "/"],
    ["launch", "-n", "2", "--elastic", "--", "true"],
    ["launch", "-n", "2", "--rejoin-after", "5", "--", "true"],
    ["launch", "-n", "2", "--max-restarts", "-1", "--", "true"],
    ["launch", "-n", "2", "--nnodes", "0", "--", "true"],
    ["launch", "-n", "2", "--", "/etc/passwd"],
    ["launch", "-n", "2", "--", ""],
    [*TABLE, "--csv", "x", "--svg", "x"],
    [*TABLE, "--weights", "1e308", "1e308", "1e308", "1e308"],
    [*TABLE, "--weights", "1e-320", "1", "1", "1"],
    [*TABLE, "--weights", "1e-9", "1", "1", "1"],
    [*TABLE, "--weights", "1"],
    [*TABLE, "--costs", "1e50", "1e50", "1e50"],
    [*TABLE, "--costs", "1e-400", "1", "1"],
    [*TABLE, "--costs", "1"],
    [*TABLE, "--chunks", "2"],
    [*TABLE, "--memory", "3"],
    [*TABLE, "--compare"],
    [*TABLE, "--search"],
    [*TABLE, "--svg", ""],
    ["schedule", "--compare"],
    ["schedule", "--search", "--stages", "4", "--microbatches", "8", "--memory", "0.01"],
    ["schedule", "CONFIG"],
    ["plan", "CONFIG", "--params", "7B", "--devices", "8"],
    ["plan", "CONFIG", "--target", "h100:8x"],
    ["plan", "CONFIG", "--target", "h100:-8"],
    ["plan", "CONFIG", "--target", "h100:8", "--compile", "-1"],
    ["plan", "CONFIG", "--target", "h100:8", "--memory", "80"],
    ["plan", "CONFIG", "--target", "h100:8", "--batch", "8"],
    ["plan", "--params", "0", "--devices", "8"],
    ["plan", "--params", "7_000", "--devices", "8"],
    ["plan", "--params", "7B", "--devices", "8", "--memory", "80xB"],
    ["plan", "--params", "7B", "--devices", "1048577"],
    ["config", "nope"],
    ["config", "train.nope"],
    ["config", "train..steps"],
    ["config", "train", "model"],
    ["tune", "CONFIG", "--rounds", "0"],
    ["tune", "CONFIG", "--calls", "-1"],
    ["eval", ".", "--batches", "0"],
    ["generate", ".", "--prompt", "a", "--tokens", "0"],
    ["generate", ".", "--prompt", "a", "--top-k", "0"],
    ["generate", ".", "--prompt", "a", "--top-p", "2"],
    ["export", ".", "x.safetensors", "--dtype", "int99"],
    ["export", ".", "x.safetensors", "--max-file", "0"],
    ["train", "CONFIG", "--resume", "/dev/zero"],
    ["train", "CONFIG", "--resume", "~nosuchuser"],
    ["train", "CONFIG", "--resume", "AUTO"],
    ["train", "CONFIG", "--dry-run", "loggers[0]=3"],
    ["train", "CONFIG", "--dry-run", "__class__=3"],
    ["train", "CONFIG", "--dry-run", "train={steps: 3"],
    ["completion", "fish"],
    [],
    [""],
    ["trian"],
    ["-"],
    ["--"],
    ["\0"],
    ["train"],
    ["train", ""],
    ["train", "a\0b"],
    ["train", "~nosuchuser/x.yaml"],
    ["train", "x" * 5000],
    ["train", "CONFIG", "--resume"],
    ["train", "CONFIG", "--fast"],
    ["verify", "CONFIG", "--steps", "0"],
    ["verify", "CONFIG", "--steps", "-3"],
    ["verify", "CONFIG", "--steps", "2.5"],
    ["verify", "CONFIG", "--steps", "\u0663"],
    ["verify", "CONFIG", "--steps", "9" * 5000],
    ["data", "burn", "CONFIG"],
    ["data", "check", "CONFIG", "--seconds", "nan"],
    ["data", "check", "CONFIG", "--seconds", "inf"],
    ["data", "check", "CONFIG", "--samples", "0"],
    ["data", "check", "CONFIG", "--seconds", "0"],
    ["eval", "/none"],
    ["eval", "CONFIG"],
    ["eval", "a\0b"],
    ["eval", "~nosuchuser/run"],
    ["eval", "/none", "--step", "\u0661"],
    ["eval", "/none", "--step", "worst"],
    ["eval", "/none", "--batches", "x"],
    ["eval", "/none", "--json", "/none/x.json"],
    ["eval", "/none", "--json", "a\0b"],
    ["eval", "/none", "--json", "/"],
    ["generate", "/none"],
    ["generate", "/none", "--prompt", "a", "--tokens", "1e3"],
    ["generate", "/none", "--prompt", "a", "--temperature", "nan"],
    ["generate", "/none", "--prompt", "a", "--seed", "\u0661"],
    ["generate", "/none", "--prompt", "a"],
    ["export", "/none", "/tmp/x", "--format", "onnx"],
    ["export", "/none", "/tmp/x", "--max-file", "1e400"],
    ["export", "/none", "/tmp/x", "--max-file", "-1"],
    ["export", "/none", "/tmp/x"],
    ["export", "/dev/zero", "/tmp/x"],
    ["inspect", "CONFIG", "--target", "abacus:8"],
    ["inspect", "CONFIG", "--target", "h100:0"],
    ["inspect", "CONFIG", "--target", "h100:\u00b2"],
    ["inspect", "CONFIG", "--target", "h100:1000000000000"],
    ["inspect", "CONFIG", "--target", ""],
    ["inspect", "CONFIG", "--json", "/none/x"],
    ["plan"],
    ["plan", "CONFIG"],
    ["plan", "CONFIG", "--devices", "0"],
    ["plan", "CONFIG", "--devices", "-8"],
    ["plan", "CONFIG", "--devices", "1000000000000"],
    ["plan", "CONFIG", "--target", "h100:" + "9" * 5000],
    ["plan", "CONFIG", "--target", "h100:\u00b2"],
    ["plan", "CONFIG", "--target", "h100:" + "8x" * 5000 + "8"],
    ["plan", "CONFIG", "--target", "h100:1000000000000"],
    ["plan", "--params", "nan", "--devices", "8"],
    ["plan", "--params", "1e999", "--devices", "8"],
    ["plan", "--params", "-7", "--devices", "8"],
    ["plan", "--params", "7 cows", "--devices", "8"],
    ["plan", "--params", "7e9", "--devices", "8", "--memory", "0"],
    ["plan", "--params", "7e9", "--devices", "8", "--memory", "9e999GB"],
    ["plan", "--params", "7e9", "--devices", "8", "--batch", "0"],
    ["plan", "--params", "7e9", "--devices", "8", "--batch", "-1"],
    ["plan", "--params", "7e9", "--devices", "8", "--sequence", "0"],
    ["plan", "--params", "7e9", "--devices", "8", "--precision", "int4"],
    ["plan", "--params", "7e9", "--devices", "8", "--optimizer", "sgdd"],
    ["schedule", "2f2b", "--stages", "4", "--microbatches", "8"],
    ["schedule", "1f1b"],
    ["schedule", "1f1b", "--stages", "0", "--microbatches", "8"],
    ["schedule", "1f1b", "--stages", "1000000000000", "--microbatches", "8"],
    ["schedule", "1f1b", "--stages", "4", "--microbatches", "1000000000000"],
    ["schedule", "1f1b", "--stages", "\u0664", "--microbatches", "8"],
    ["schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--costs", "nan", "1", "1"],
    ["schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--costs", "1e308", "1", "1"],
    ["schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--costs", "-1", "1", "1"],
    ["schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--costs", "0", "0", "0"],
    ["schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--svg", "/none/x.svg"],
    ["schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--svg", "/dev/full"],
    ["schedule", "interleaved_1f1b", "--stages", "4", "--microbatches", "8", "--chunks", "0"],
    [
        "schedule",
        "interleaved_1f1b",
        "--stages",
        "4",
        "--microbatches",
        "8",
        "--chunks",
        "99999999",
    ],
    ["schedule", "/none.csv"],
    ["schedule", "a\0b.csv"],
    ["launch"],
    ["launch", "--", "no-such-program-anywhere"],
    ["launch", "-n", "0", "--", "true"],
    ["launch", "-n", "1000000000000", "--", "true"],
    ["launch", "-n", "\u0662", "--", "true"],
    ["launch", "--grace", "nan", "--", "true"],
    ["launch", "--grace", "-1", "--", "true"],
    ["launch", "--master-port", "70000", "--", "true"],
    ["launch", "--master-port", "0", "--", "true"],
    ["launch", "--node-rank", "3", "--", "true"],
    ["launch", "--nnodes", "2", "--", "true"],
    ["launch", "--log-dir", "/dev/null/x", "--", "true"],
    ["launch", "--log-dir", "a\0b", "--", "true"],
    ["launch", "--devices-per-process", "0", "--", "true"],
    ["launch", "--devices-per-process", "1000000000000", "--", "true"],
    ["doctor", "--numerics", "some"],
    ["doctor", "please"],
]
VARIABLES = [
    {"NPROC": "abc"},
    {"NPROC": "1e3"},
    {"NPROC": "-"},
    {"NPROC": "9" * 5000},
    {"NPROC": "\u0661"},
    {"NPROC": "-1"},
    {"NPROC": "9999999999"},
    {"JAX_NUM_CPU_DEVICES": "abc"},
    {"JAX_NUM_CPU_DEVICES": "1000000000"},
    {"JAX_NUM_CPU_DEVICES": "-2"},
    {"AXON_LAUNCH_TIMEOUT": "soon"},
    {"AXON_SILENCE_TIMEOUT": "nan"},
    {"AXON_SILENCE_TIMEOUT": "0"},
    {"AXON_STEP_TIMEOUT": "1e300"},
    {"AXON_STEP_TIMEOUT": "inf"},
    {"AXON_CLUSTER": "abacus"},
    {"AXON_CLUSTER": ""},
    {"WORLD_SIZE": "\u0662", "RANK": "0"},
    {"WORLD_SIZE": "1_0", "RANK": "0"},
    {"WORLD_SIZE": "9" * 5000, "RANK": "0"},
    {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": " "},
    {"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1e4"},
    {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "x"},
    {"SM_HOSTS": "algo-1"},
    {"SM_HOSTS": "[" * 5000},
    {"SM_HOSTS": "[1, 2]"},
    {"SM_HOSTS": "9" * 5000},
    {"SM_HOSTS": "[" * 100_000},
    {"AXON_PLANNED_WORLD_SIZE": "x"},
    {"WORLD_SIZE": "2", "RANK": "0", "JAX_PARTITION_INDEX": "x"},
    {"JAX_COORDINATOR_ADDRESS": "here", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
    {"JAX_COORDINATOR_ADDRESS": "here:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"},
    {"OMPI_COMM_WORLD_SIZE": "x", "OMPI_COMM_WORLD_RANK": "0"},
    {"MASTER_PORT": "abc"},
]


def name_of(variables):
    return " ".join(f"{name} {ascii(value)[1:-1]:.20}" for name, value in variables.items())


@contextlib.contextmanager
def alarm():
    """Nothing here may take long, or wait for something."""

    def late(*_):
        raise AssertionError(f"longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(4 * SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refused(capsys, arguments):
    """Runs the command, which must say one line and leave by code 2; the line."""
    started = time.process_time()
    with alarm():
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code
    out, err = capsys.readouterr()
    assert code == 2, err
    assert "Traceback" not in out + err
    assert err.startswith("axon: error: ")
    assert err.count("\n") == 1
    assert len(err) < 2300
    assert time.process_time() - started < SECONDS
    return err


@pytest.fixture
def config(tmp_path, texts, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(
        f"run_dir: {tmp_path}/run\ndevices: {{emulate: 8}}\n"
        "model: {width: 8, num_layers: 1, num_heads: 2, ffn_width: 16, max_length: 16}\n"
        f"data: {{files: [{texts}/train.txt], validation_files: [{texts}/validation.txt], "
        "sequence_length: 16}\ntrain: {steps: 6, global_batch: 8}\n"
    )
    yield path
    assert not (tmp_path / "run").exists()


@pytest.mark.sample("twice", "no end")
@pytest.mark.parametrize("text", YAML.values(), ids=YAML)
def test_wrong_yaml_is_one_line(capsys, tmp_path, text):
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    refused(capsys, ["train", str(path)])


@pytest.mark.sample("UTF-16")
@pytest.mark.parametrize("content", BYTES.values(), ids=BYTES)
def test_wrong_bytes_in_a_config_are_one_line(capsys, tmp_path, content):
    path = tmp_path / "odd.yaml"
    path.write_bytes(content)
    refused(capsys, ["train", str(path)])


def make_odd(path, kind):
    """Puts something at a path that is no file."""
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")


def odd(tmp_path, name, kind):
    folder = tmp_path / "odd"
    folder.mkdir()
    make_odd(folder / name, kind)
    return folder / name


@pytest.mark.sample("train PATH-none", "train CONFIG data.files=[PATH]-folder", "eval PATH-none")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "words",
    [
        ["train", "PATH"],
        ["train", "CONFIG", "data.files=[PATH]", "optimizer=sgd"],
        ["train", "CONFIG", "data.tokenizer=PATH", "optimizer=sgd"],
        ["eval", "PATH"],
        ["export", "PATH", "out.safetensors"],
        ["schedule", "PATH"],
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_paths_that_are_not_files_raise(capsys, config, tmp_path, words, kind):
    name = "x.csv" if words[0] == "schedule" else "x"
    path = str(odd(tmp_path, name, kind))
    refused(capsys, [w.replace("PATH", path).replace("CONFIG", str(config)) for w in words])


@pytest.mark.sample("folder")
@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling", "zero", "loop"])
def test_a_run_folder_whose_config_is_none(capsys, tmp_path, kind):
    path = odd(tmp_path, "config.yaml", kind)
    refused(capsys, ["eval", str(path.parent)])


@pytest.mark.full
@pytest.mark.parametrize("name", ["loss.png", "summary.json", "program.json"])
def test_a_run_folder_that_contains_something_else(capsys, config, tmp_path, name):
    folder = odd(tmp_path, name, "pipe").parent
    refused(capsys, ["train", str(config), f"run_dir={folder}"])
    assert os.listdir(folder) == [name]


@pytest.mark.sample(
    *("trian.steps=3", "train.steps=2.5", "train.global_batch=7", "seed=abc", "parallel=dddp"),
    *("model.kind=gpt5", "mesh=dp=16"),
)
@pytest.mark.parametrize("override", OVERRIDES, ids=lambda text: ascii(text)[1:-1][:50])
def test_wrong_overrides_are_one_line(capsys, config, override):
    refused(capsys, ["train", str(config), override])


@pytest.mark.sample("trian", "train CONFIG --fast")
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda row: ascii(" ".join(row))[1:-1][:70])
def test_wrong_arguments_of_the_command(capsys, config, arguments):
    refused(capsys, [str(config) if word == "CONFIG" else word for word in arguments])


@pytest.mark.sample("NPROC abc", "MASTER_PORT abc")
@pytest.mark.parametrize("variables", VARIABLES, ids=name_of)
def test_wrong_environment_variables_are_one_line(capsys, config, monkeypatch, variables):
    # A backend that runs already would not look at what it is to make up.
    monkeypatch.setattr("axon_dist.launch.distributed.backend_started", lambda: False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refused(capsys, ["train", str(config)])


def header(text, tail=b""):
    return struct.pack("<Q", len(text)) + text + tail


def npy(shape, dtype="<u2"):
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}".ljust(118) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


# A step is built before the data are read, and that of sgd is traced in less time.
QUICK = ["optimizer=sgd", "--no-step"]
PICTURES, LABELS = np.zeros((10, 8, 8, 3), np.uint8), np.zeros(10, np.int32)
FILES = {
    "tokens": {
        "empty.bin": b"",
        "odd.bin": b"abc",
        "empty.npy": b"",
        "text.npy": b"hello",
        "lies.npy": npy("(1000000000000,)"),
        "negative.npy": npy("(-3,)"),
        "scalar.npy": npy("()"),
        "objects.npy": npy("(3,)", "|O"),
        "dtype.npy": npy("(3,)", "<q99"),
        "floats.npy": npy("(2,)", "<f4") + b"\0" * 8,
        "code.npy": npy("__import__('os').getcwd()"),
        "archive.npy": npz(a=LABELS),
    },
    "images": {
        "empty.npz": b"",
        "text.npz": b"hello",
        "cut.npz": npz(images=PICTURES, labels=LABELS)[:-40],
        "flipped.npz": npz(images=PICTURES, labels=LABELS)[:200] + b"\xff" * 500,
        "none.npz": npz(),
        "other.npz": npz(a=LABELS),
        "sizes.npz": npz(images=PICTURES[:, :4], labels=LABELS),
        "count.npz": npz(images=PICTURES, labels=LABELS[:3]),
        "dtype.npz": npz(images=PICTURES.astype(np.float32), labels=LABELS),
        "labels.npz": npz(images=PICTURES, labels=LABELS - 1),
        "objects.npz": npz(images=np.array([None]), labels=LABELS),
    },
    "jsonl": {
        "empty.jsonl": b"",
        "blank.jsonl": b"\n\n \n",
        "text.jsonl": b"hello\n" * 30,
        "list.jsonl": b"[1]\n" * 30,
        "deep.jsonl": b"[" * 20_000 + b"\n",
        "number.jsonl": b'{"text": 3}\n' * 30,
        "field.jsonl": b'{"body": "x"}\n' * 30,
        "digits.jsonl": b'{"text": ' + b"9" * 5000 + b"}\n",
        "bytes.jsonl": b'{"text": "\xff"}\n' * 30,
        "half.jsonl": b'{"text": "\\ud800"}\n' * 30,
    },
    "array_record": {
        "empty.array_record": b"",
        "text.array_record": b"hello",
        "flipped.array_record": b"\xff" * 70_000,
    },
    "datasets": {
        "empty.arrow": b"",
        "text.arrow": b"hello",
        "flipped.arrow": b"\xff" * 300,
        "huge.arrow": b"\xff\xff\xff\xff\xff\xff\xff\x7f" + b"\0" * 300,
    },
    "image_records": {
        "empty.parquet": b"",
        "text.arrow": b"hello",
        "what.bin": b"hello",
    },
    "parquet": {
        "empty.parquet": b"",
        "text.parquet": b"PAR1 hello PAR1",
        "cut.parquet": b"PAR1" + b"\xff" * 100 + b"\xff\xff\xff\x7fPAR1",
    },
}


@pytest.mark.sample("jsonl-field.jsonl", "images-count.npz")
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, rows in FILES.items() for name in rows],
    ids=lambda text: text,
)
def test_files_that_lie(capsys, config, tmp_path, kind, name):
    file = tmp_path / name
    file.write_bytes(FILES[kind][name])
    data = f"data={{kind: {kind}, files: [{file}]}}"
    model = []
    if "image" in kind:
        data = f"data={{kind: {kind}, files: [{file}], image_size: 8}}"
        model = ["model={kind: vit, width: 8, num_layers: 1, num_heads: 2, image_size: 8, "
                 "patch_size: 4, num_classes: 3}"]  # fmt: skip
    refused(capsys, ["data", "check", str(config), data, *model, *QUICK])


def word_level(vocabulary, **parts):
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "u"}
    return json.dumps({"version": "1.0", "model": model, **parts})


TOKENIZERS = {
    "empty": "",
    "text": "hello",
    "list": "[]",
    "object": "{}",
    "deep": "[" * 20_000,
    "null model": '{"version": "1.0", "model": null}',
    "no vocabulary": json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {},
                                                            "unk_token": "x"}}),
    "negative": json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": -1},
                                                       "unk_token": "a"}}),
    "version": '{"version": "99.0", "model": {}}',
    "nothing for the rest": word_level({"zzz": 0}),
    "token behind the last": word_level(
        {"u": 0}, post_processor={"type": "BertProcessing", "sep": ["x", 999], "cls": ["y", 888]}
    ),
    "unknown special token": word_level(
        {"u": 0},
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        },
    ),
    "grows": word_level(
        {"u": 0},
        normalizer={
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"String": "l"}, "content": "l" * 99}]
            * 4,
        },
    ),
}  # fmt: skip


@pytest.mark.sample("text")
@pytest.mark.parametrize("text", TOKENIZERS.values(), ids=TOKENIZERS)
def test_broken_tokenizers(capsys, config, tmp_path, text):
    file = tmp_path / "tokenizer.json"
    file.write_text(text)
    refused(capsys, ["data", "check", str(config), f"data.tokenizer={file}", *QUICK])


TABLES = {
    "empty": "",
    "text": "hello",
    "binary": "\x00\x01",
    "huge stage": "999999999999F0,\n",
    "half": "0F0,0B",
    "unicode": "\u0660F0,0B0",
    "order": "0B0,0F0",
    "missing": "0F0,0F1,0B0",
}


@pytest.mark.full
@pytest.mark.parametrize("text", TABLES.values(), ids=TABLES)
def test_tables_that_are_none(capsys, tmp_path, text):
    file = tmp_path / "table.csv"
    file.write_text(text)
    started = time.process_time()
    with alarm():
        assert main(["schedule", str(file)]) == 2
    out, err = capsys.readouterr()
    # The grid with the cell that is wrong is drawn as output.
    assert err.count("\n") == 1
    assert "Traceback" not in out + err
    assert time.process_time() - started < SECONDS


def run(*arguments, **options):
    """A real command."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    command = [sys.executable, "-m", "axon_dist.train.cli", *arguments]
    env |= options.pop("env", {})
    return subprocess.run(command, env=env, capture_output=True, timeout=120, **options)


@pytest.mark.full
@pytest.mark.sample("name")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", b"\xff.yaml"], b"cannot read the config"),
        (["train", "/dev/zero"], b"it is a device, not a file"),
    ],
    ids=["name", "device"],
)
def test_real_commands(arguments, words, tmp_path):
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(b"\n") == 1
    assert words in done.stderr
    assert not pathlib.Path(tmp_path, "run").exists()


SCHEDULE = ["schedule", "1f1b", "--stages", "2", "--microbatches", "2"]


@pytest.mark.full
@pytest.mark.parametrize("arguments", [SCHEDULE, ["config", "train"]], ids=lambda words: words[0])
@pytest.mark.parametrize("is_buffered", [False, True])
def test_a_full_standard_output_is_one_line_too(tmp_path, arguments, is_buffered):
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    env |= {"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "" if is_buffered else "1"}
    command = [sys.executable, "-m", "axon_dist.train.cli", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith(
        b"axon: error: the standard output cannot be written: No space left on device; make room"
    )
    assert done.stderr.count(b"\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.fixture
def trained(tmp_path, texts, monkeypatch):
    """A run that saved two checkpoints, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(
        "run_dir: run\nmodel: {width: 8, num_layers: 1, num_heads: 2, ffn_width: 16, "
        "max_length: 16}\nmesh: dp=1\ndevices: {emulate: 1}\n"
        f"data: {{files: [{texts}/train.txt], validation_files: [{texts}/validation.txt], "
        "sequence_length: 16}\ntrain: {steps: 2, global_batch: 8, eval_every: 0}\n"
        "checkpoint: {every: 1}\n"
    )
    assert main(["train", str(path)]) == 0
    return tmp_path / "run"


GENERATE = ("generate", "run", "--one-device", "--tokens", "3", "--prompt")
OF_A_RUN = [
    ["eval", "run", "--batches", "99999999"],
    ["report", "run", "--out", "/dev/full"],
    [*GENERATE, "a", "--temperature", "1e308"],
    [*GENERATE, "a", "--temperature", "1e-308"],
    [*GENERATE, "a", "--seed", "-1"],
    [*GENERATE, "a", "--seed", "99999999999999"],
    [*GENERATE, "\udcff"],
    ["export", "run", "/dev/full"],
    ["train", "run.yaml", "--dry-run"],
]


@pytest.mark.full
def test_wrong_arguments_next_to_a_running_job(capsys, trained):
    for arguments in OF_A_RUN:
        capsys.readouterr()
        code = main(arguments)
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if line.startswith("axon: ")]
        assert code == 2, arguments
        assert len(lines) == 1, arguments
        assert lines[0].startswith("axon: error: "), arguments
        assert "Warning" not in out + err, arguments
    # Files that are not of a run are noted on the page, and are never waited for.
    for kind in ("pipe", "zero", "folder"):
        (trained / "metrics.jsonl").unlink(missing_ok=True)
        make_odd(trained / "metrics.jsonl", kind)
        with alarm():
            assert main(["report", "run"]) == 0
        assert "metrics.jsonl cannot be read" in (trained / "report.html").read_text()
        if kind == "folder":
            break
    # A newer checkpoint that is damaged is never passed over without a word.
    (trained / "checkpoints" / "step_00000002" / "manifest.json").write_text("{}")
    for arguments in (["eval", "run", "--batches", "1"], [*GENERATE, "a"], ["export", "run", "w"]):
        capsys.readouterr()
        assert main(arguments) == 0
        out, err = capsys.readouterr()
        assert "step_00000002" in out + err, arguments
        assert "using the checkpoint before it" in " ".join((out + err).split()), arguments
