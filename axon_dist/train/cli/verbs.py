"""The table of verbs, with their arguments and functions. Importing it does not import JAX."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
from collections.abc import Mapping
from typing import Any

from axon_dist.schedule import SCHEDULES, PipelineSchedule

from .values import as_file, as_int, as_json_object, as_number, check_output


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a verb.

    Args:
        names: the names for `argparse`, such as `("-n", "--num-processes")`.
        options: the keywords of `ArgumentParser.add_argument`.
        is_output: whether the argument names a file that the verb writes.
    """

    names: tuple[str, ...]
    options: Mapping[str, Any]
    is_output: bool = False


@dataclasses.dataclass(frozen=True)
class Verb:
    """One row of the table of verbs.

    Args:
        name: the word typed after `axon`.
        help: a sentence for `axon --help`.
        function: the function of the verb, as `module:function` in this package. The module is
            imported when the verb runs.
        arguments: the arguments of the verb.
        examples: commands for `axon NAME --help`.
    """

    name: str
    help: str
    function: str
    arguments: tuple[Argument, ...]
    examples: tuple[str, ...]

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments to a parser."""
        for argument in self.arguments:
            parser.add_argument(*argument.names, **argument.options)
        parser.set_defaults(verb=self)

    def run(self, arguments: argparse.Namespace) -> int:
        """Checks that the verb's output files can be written, and runs it; returns the exit code.

        Raises:
            ConfigError: when a file cannot be written.
        """
        for argument in self.arguments:
            if argument.is_output:
                (option,) = argument.names
                check_output(option, getattr(arguments, option.removeprefix("--")))
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(f"{__package__}.{module}"), name)(arguments)


def _verb(
    name: str, help: str, function: str, *arguments: Argument, examples: tuple[str, ...]
) -> Verb:
    return Verb(name, help, function, arguments, examples)


def _argument(names: str, help: str, **options: object) -> Argument:
    return Argument(tuple(names.split()), {"help": help, **options})


_int = functools.partial(_argument, type=as_int)
_number = functools.partial(_argument, type=as_number)
_flag = functools.partial(_argument, action="store_true")
_overrides = functools.partial(
    _argument, "overrides", nargs="*", default=[], metavar="key.path=value"
)


def _file(name: str, help: str) -> Argument:
    return Argument((name,), {"help": help, "type": as_file, "metavar": "FILE"}, is_output=True)


_CONFIG = (
    _argument("config", "a YAML file, see configs/", metavar="CONFIG"),
    _overrides("replaces a value of the config, as in train.steps=100; read as YAML"),
)
_FOLDER = _argument("run", "the folder of a run", metavar="RUN")
_STEP = _argument(
    "--step",
    "the checkpoint of that step, or the best by train.best; the newest by default",
    type=lambda text: text if text == "best" else as_int(text),
    metavar="N|best",
)
_TRUST = _flag("--trust", "import and call the functions that its config.yaml names")
_RUN = (
    _FOLDER,
    _overrides("changes its config, as in mesh=dp=4; any mesh and strategy works"),
    _STEP,
    _TRUST,
    _flag("--one-device", "use one device instead of its mesh"),
)


def _schedulers(*names: str) -> tuple[Argument, ...]:
    """Declares an option for each row of `train.jobs.SCHEDULERS`, whose import would import JAX."""
    return tuple(
        _argument(
            f"--{name}",
            f"writes a job file for {name} that trains CONFIG on many nodes, and checks it",
            metavar="CONFIG",
        )
        for name in names
    )


VERBS: tuple[Verb, ...] = (
    _verb(
        "train",
        "Train the model that a config describes.",
        "runs:train_config",
        *_CONFIG,
        _argument(
            "--resume",
            "resume a run: auto uses its newest good checkpoint, if there is one; PATH is a "
            "checkpoint, or a run whose newest good checkpoint is used",
            metavar="auto|PATH",
        ),
        _flag("--dry-run", "compile, and print what a run would do; train and write nothing"),
        examples=(
            "axon train configs/quickstart.yaml",
            "axon train configs/quickstart.yaml train.steps=500 parallel=fsdp",
            "axon train configs/quickstart.yaml --resume auto",
            "axon train configs/quickstart.yaml --dry-run",
        ),
    ),
    _verb(
        "eval",
        "Measure the model of a run on its validation data.",
        "runs:evaluate_run",
        *_RUN,
        _argument(
            "--data",
            "a path or glob to measure on instead of the run's validation data; may be repeated",
            dest="files",
            action="append",
            default=[],
            metavar="FILES",
        ),
        _int(
            "--batches",
            "use only N batches; all data by default",
            dest="num_batches",
            metavar="N",
        ),
        _file("--json", "write the numbers to this file too"),
        examples=(
            "axon eval runs/quickstart-20260101-120000",
            "axon eval runs/a --step best --batches 16 --json found.json",
            "axon eval runs/a mesh=tp=4 parallel=tensor",
        ),
    ),
    _verb(
        "generate",
        "Continue a text with the model of a run.",
        "runs:generate_texts",
        *_RUN,
        _argument(
            "--prompt",
            "the text to continue; may be repeated",
            dest="prompts",
            action="append",
            required=True,
            metavar="TEXT",
        ),
        _int(
            "--tokens", "maximum tokens to add (100)", dest="num_tokens", default=100, metavar="N"
        ),
        _number(
            "--temperature",
            "0 takes the likeliest token, 1 samples from the model's distribution (1)",
            default=1.0,
            metavar="T",
        ),
        _int("--top-k", "sample among the K likeliest tokens", metavar="K"),
        _number(
            "--top-p", "sample among the likeliest tokens with total probability P", metavar="P"
        ),
        _int("--seed", "the seed of the sampling (0)", default=0),
        _flag("--chat", "answer each prompt as a user's message, with the run's chat template"),
        _argument("--system", "with --chat: the system message", metavar="TEXT"),
        _argument(
            "--template-options",
            "with --chat: variables of the template, the chat_template_kwargs of the training",
            type=as_json_object,
            metavar="JSON",
        ),
        _argument(
            "--past-end",
            "continue where the model ends the document",
            dest="stops",
            action="store_false",
        ),
        _file("--json", "write the texts to this file too"),
        examples=(
            'axon generate runs/a --prompt "def main("',
            'axon generate runs/a --prompt "To be" --tokens 50 --temperature 0 --one-device',
            'axon generate runs/chat --chat --prompt "What is JAX?" --system "Answer briefly."',
        ),
    ),
    _verb(
        "export",
        "Write the weights of a run as safetensors.",
        "runs:export",
        _FOLDER,
        _argument("path", "a file that ends in .safetensors, or a folder for it", metavar="OUT"),
        _argument(
            "--format",
            "names of the tensors: native for the names of the model, or a hub format such as "
            "hf-llama, which also writes config.json; an unknown name lists all formats",
            default="native",
        ),
        _STEP,
        _TRUST,
        _argument("--dtype", "dtype of floats, such as bfloat16; as saved by default"),
        _argument(
            "--max-file", "split into several files above this size, such as 5GB", metavar="SIZE"
        ),
        _flag(
            "--adapters",
            "write only the LoRA adapters, in peft's format; --format is that of the base model, "
            "by default that of the run's weights",
        ),
        examples=(
            "axon export runs/a model.safetensors",
            "axon export runs/a out --format hf-llama --dtype bfloat16",
            "axon export runs/lora adapters --adapters",
        ),
    ),
    _verb(
        "report",
        "Draw a run as one HTML page.",
        "runs:report",
        _argument("run", "the folder of a run, finished or not", metavar="RUN"),
        _argument(
            "--compare",
            "compare with this run: figures, config differences, curves; may be repeated",
            action="append",
            default=[],
            metavar="RUN2",
        ),
        _file("--out", "the page; report.html in the run, or here if the run is in a bucket"),
        examples=("axon report runs/a", "axon report runs/a --compare runs/b --out both.html"),
    ),
    _verb(
        "config",
        "List the keys of a config: type, default and meaning.",
        "runs:list_keys",
        _argument(
            "section",
            "a section or key, such as train, optimizer.schedule or parallel.ddp; the top keys by "
            "default",
            nargs="?",
            metavar="SECTION",
        ),
        _flag("--full", "include all nested sections"),
        _flag("--markdown", "print Markdown tables"),
        examples=("axon config", "axon config train", "axon config --full optimizer"),
    ),
    _verb(
        "data",
        "Show a config's data, and check how fast it loads.",
        "runs:check_samples",
        _argument("action", "check: load some samples, and time them", choices=["check"]),
        *_CONFIG,
        _int("--samples", "number of samples to show (3)", default=3),
        _number("--seconds", "seconds to load data for (2)", default=2.0),
        _flag("--no-step", "do not compile and time the step"),
        examples=(
            "axon data check configs/quickstart.yaml",
            "axon data check configs/quickstart.yaml --no-step --samples 1",
        ),
    ),
    _verb(
        "plan",
        "Rank meshes and strategies for any machine, present or not.",
        "plans:run",
        _argument("config", "a YAML file, see configs/", nargs="?", metavar="CONFIG"),
        _CONFIG[1],
        _argument("--target", "hardware and its size: h100:8, h100:4x8, v5p:4x4x4"),
        _argument("--params", "instead of a config: number of parameters, such as 7e9 or 7B"),
        _int("--devices", "instead of a target: number of devices"),
        _argument("--memory", "memory of one device, such as 80GB; the target's by default"),
        _int("--batch", "with --params: samples per step"),
        _int("--sequence", "with --params: tokens per sample"),
        _argument("--optimizer", "with --params: name of the optimizer; adam by default"),
        _argument("--precision", "with --params: float32, bf16 or fp16"),
        _int(
            "--compile",
            "with a config and a target: compile the best K plans, and show their memory",
            default=0,
            metavar="K",
        ),
        examples=(
            "axon plan --params 7B --devices 8 --memory 80GB",
            "axon plan configs/fsdp8.yaml --target h100:8",
            "axon plan configs/recipes/resnet50_ddp8.yaml --target h100:8 --compile 2",
        ),
    ),
    _verb(
        "inspect",
        "Show memory, collectives and FLOPs of a config's step.",
        "runs:inspect",
        *_CONFIG,
        _argument("--target", "compile for this machine, such as h100:8 or v5p:2x2x2"),
        _file("--json", "write the report to this file too"),
        examples=(
            "axon inspect configs/fsdp8.yaml",
            "axon inspect configs/fsdp8.yaml --target h100:8 --json report.json",
        ),
    ),
    _verb(
        "tune",
        "Measure a config's step under several compiler options.",
        "runs:tune_step",
        *_CONFIG,
        _int("--rounds", "timed rounds per variant (5)", default=5),
        _int("--calls", "steps per round (4)", default=4),
        _file("--json", "write the figures to this file too"),
        examples=(
            "axon tune configs/quickstart.yaml --rounds 3",
            "axon tune configs/fsdp8.yaml train.global_batch=16 --json tuned.json",
        ),
    ),
    _verb(
        "profile",
        "Measure where the time of a step goes, line by line.",
        "runs:profile",
        _argument(
            "place",
            "a YAML file, or the folder of a run, which then stores the figures for axon report",
            metavar="CONFIG|RUN",
        ),
        _CONFIG[1],
        _int("--steps", "number of measured steps (3)", default=3),
        _TRUST,
        _file("--json", "write the figures to this file too"),
        examples=(
            "axon profile configs/quickstart.yaml",
            "axon profile configs/fsdp8.yaml train.global_batch=16 --json waterfall.json",
            "axon profile runs/a mesh=dp=4",
        ),
    ),
    _verb(
        "launch",
        "Start several processes on this host, and monitor them.",
        "launching:launch_processes",
        _int("-n --num-processes", "processes on this host", default=1),
        _int("--devices-per-process", "CPU devices that each process emulates"),
        _int("--nnodes", "hosts that run this command", default=1),
        _int("--node-rank", "the number of this host, from 0", default=0),
        _argument("--master-addr", "the host of rank 0", default="localhost"),
        _int("--master-port", "a free port there; chosen automatically on a single host"),
        _int(
            "--max-restarts",
            "restart at most so often after failures; CMD must resume by itself",
            default=0,
        ),
        _flag("--elastic", "restart without the processes that were lost"),
        _number(
            "--rejoin-after",
            "with --elastic: restart with all processes after this time on fewer, between steps",
            metavar="SECONDS",
        ),
        _number("--grace", "seconds for the others to end after one failed", default=5.0),
        _argument(
            "--log-dir", "the folder for rank-<r>.log; runs/launch-<time> by default", type=as_file
        ),
        _argument("--hosts", "start on these hosts over ssh, as in node0,node1; node0 has rank 0"),
        _argument("--hostfile", "the same from a file with a host on each line", type=as_file),
        _argument("--attached", argparse.SUPPRESS, action="store_true"),
        *_schedulers("slurm", "jobset", "skypilot"),
        _int("--nodes", "with a scheduler: number of nodes (1)"),
        _int("--gpus", "with a scheduler: GPUs per node (8)"),
        _argument("--name", "with a scheduler: name of the job; the config's name by default"),
        _argument("--shared", "with a scheduler: a folder that all nodes share (/shared)"),
        _argument("--image", "with jobset and skypilot: image of the containers"),
        _argument("--accelerator", "with skypilot: the GPU's name (H100)"),
        _int("--hours", "with slurm: time limit of the job (24)"),
        _flag("--efa", "with a scheduler: nodes are connected by Elastic Fabric Adapters"),
        _file("--out", "with a scheduler: the job file; NAME.sbatch or NAME.yaml by default"),
        _flag("--submit", "with a scheduler: submit the job file"),
        _argument(
            "command",
            "the command of every rank; with a scheduler, values that replace the config's",
            nargs=argparse.REMAINDER,
            metavar="-- CMD",
        ),
        examples=(
            "axon launch -n 4 -- axon train configs/quickstart.yaml",
            "axon launch -n 2 --devices-per-process 4 -- python train.py",
            "axon launch --hosts node0,node1 -n 8 -- axon train CONFIG run_dir=/shared/run",
            "axon launch --slurm configs/fsdp8.yaml --nodes 8 --gpus 8 mesh.fsdp=-1 "
            "train.global_batch=64",
            "axon launch -n 8 --max-restarts 9 -- axon train CONFIG checkpoint.memory_every=20 "
            "--resume auto",
        ),
    ),
    _verb(
        "schedule",
        "Draw and measure a pipeline schedule.",
        "schedule:run",
        _argument(
            "name",
            f"{', '.join(SCHEDULES)}, or a CSV file; {PipelineSchedule.EAGER_1F1B} by default",
            nargs="?",
        ),
        _int("--stages", "ranks along the pipeline", metavar="S"),
        _int("--microbatches", "microbatches per step", metavar="M"),
        _int("--chunks", "stages per rank", metavar="V"),
        _number(
            "--costs",
            "times of forward F, input gradient I and weight gradient W, and of a whole backward B "
            "if it is not I + W; 1 1 1 by default",
            nargs="+",
            metavar="TIME",
            default=(1.0, 1.0, 1.0),
        ),
        _number(
            "--weights",
            "relative costs of the stages in model order; 1 is an equal share",
            nargs="+",
            metavar="SHARE",
            default=(),
        ),
        _number(
            "--vocabulary",
            "split embedding and head over all ranks: the time V of one rank's part of head and "
            "loss, forward and backward; lookups E and their gradients G take no time",
            metavar="TIME",
        ),
        _flag("--ahead", "draw ranks that run ahead without waiting for each tick"),
        _flag("--search", "search for a faster table in lockstep"),
        _number(
            "--memory",
            "with --search: the maximum number of microbatches whose activations a rank keeps for "
            "the backward pass, over all its layers",
            metavar="N",
        ),
        _file("--svg", "write a picture to this file"),
        _file("--csv", "write the table to this file"),
        _flag("--compare", "measure all schedules instead"),
        examples=(
            "axon schedule 1f1b --stages 4 --microbatches 8",
            "axon schedule interleaved_1f1b --stages 4 --microbatches 8 --chunks 2 --svg table.svg",
            "axon schedule eager_1f1b --stages 4 --microbatches 8 --vocabulary 0.5",
            "axon schedule --stages 4 --microbatches 8 --compare",
        ),
    ),
    _verb(
        "verify",
        "Compare a config's strategy with one device.",
        "runs:verify_config",
        *_CONFIG,
        _int("--steps", "steps to compare (5; with --here 2)"),
        _flag(
            "--here",
            "use the real devices of this machine, and a model with only a few layers",
        ),
        examples=("axon verify configs/fsdp8.yaml", "axon verify configs/fsdp8.yaml --here"),
    ),
    _verb(
        "prove",
        "Compare a program with itself on one device.",
        "proofs:prove",
        _argument(
            "target", "a function of a file, such as step.py:train_step", metavar="FILE:NAME"
        ),
        _argument(
            "--mesh",
            "the mesh sizes, as dp=4,tp=2; may be repeated; those of the file by default",
            dest="meshes",
            action="append",
            default=[],
            metavar="SIZES",
        ),
        _argument(
            "--shape",
            "an argument to draw at random, as f32[16,8]; repeat it for each",
            dest="shapes",
            action="append",
            default=[],
            metavar="SHAPE",
        ),
        _argument(
            "--arguments", "a function of the file that returns the arguments", metavar="NAME"
        ),
        _int("--draws", "how often shapes are drawn (2)", default=2, metavar="N"),
        _file("--json", "write the findings to this file too"),
        _file("--sarif", "write them in SARIF, for code review"),
        examples=(
            "axon prove step.py:train_step",
            "axon prove loss.py:make --mesh dp=4,tp=2 --shape 'f32[16,8]' --sarif found.sarif",
        ),
    ),
    _verb(
        "bisect",
        "Find the first operation where two programs differ.",
        "proofs:bisect",
        _argument(
            "targets",
            "two functions of files as in `axon prove`, two configs, or two files of --record; "
            "after configs, values that replace those of both, as in train.global_batch=8",
            nargs="+",
            metavar="A B",
        ),
        _argument(
            "--python",
            "record A in the environment of this Python too, and compare the two",
            metavar="PATH",
        ),
        _file("--record", "only write the fingerprints of A to this file"),
        _argument("--mesh", "the mesh of A, as dp=4; that of its file by default"),
        _argument(
            "--other-mesh",
            "the mesh of B; by default --mesh; of two functions, B's own if --mesh lacks axes",
        ),
        _argument(
            "--shape",
            "an argument to draw at random, as f32[16,8]; repeat it for each",
            dest="shapes",
            action="append",
            default=[],
            metavar="SHAPE",
        ),
        _argument(
            "--arguments", "a function of the file of A that returns the arguments", metavar="NAME"
        ),
        _int(
            "--steps",
            "steps to compare (3 of a config; 1 of a function, whose outputs become its first "
            "arguments)",
        ),
        _file("--json", "write the findings to this file too"),
        examples=(
            "axon bisect old.py:step new.py:step --arguments batch",
            "axon bisect step.py:make step.py:make --mesh dp=1 --other-mesh dp=8",
            "axon bisect configs/fsdp8.yaml configs/zero1.yaml model.num_layers=2",
            "axon bisect configs/fsdp8.yaml --python ~/jax-0.10/bin/python",
        ),
    ),
    _verb(
        "doctor",
        "Print versions, devices, and what is missing.",
        "machine:doctor",
        _argument(
            "--numerics",
            "compare the gradients of many operations, sharded over a mesh, with one device",
            nargs="?",
            const="core",
            choices=("core", "full"),
        ),
        _argument(
            "--network",
            "measure bandwidth and latency along each axis of this mesh, and name slow hosts",
            nargs="?",
            const="dp=-1",
            metavar="MESH",
        ),
        examples=(
            "axon doctor",
            "axon doctor --numerics",
            "axon doctor --network nodes=2,fsdp=8",
        ),
    ),
    _verb(
        "completion",
        "Print a script for shell completion of this command.",
        "main:print_completion",
        _argument("shell", "the shell to print the script for", choices=["bash", "zsh"]),
        examples=('eval "$(axon completion bash)"', "axon completion zsh > ~/.axon-completion.zsh"),
    ),
)
"""Every verb, in the order of `axon --help`."""
