"""Measures what a compiled step sends, stores and computes on each device.

Most of this package reads only the text of the optimised program that will run. Besides, `memory`
asks the compiler, `timeline.py` reads traces, and `steps.py` traces steps. It does not know the
strategies, so it can check their claims independently. Times follow from the peak rates of
`mesh.chips`, except those of `model_time` and `waterfall`.

* `collectives` lists the collectives: their bytes, mesh axis and count, and whether compute hides
  them. `expect_collectives` and `expect_bytes` turn that into tests.
* `memory` asks the compiler for bytes per device; `device_bytes` measures the bytes of arrays.
* `carried_bytes` measures the carry of a loop, such as the sum of gradients.
* `kernels` counts custom calls, including fused attention, and `expect_kernels` turns that into
  tests; `recomputed` counts the instructions that XLA rematerialises on its own.
* `flops` counts matrix operations, multiplied by the trip counts of loops.
* `model_time` sums the times of the kernels, each at the rate that its shape reaches
  (`mesh.rates`).
* `report` combines these.
* `trace_step`, `lower_init`, `lower_outer_steps` and `trace_outer_steps` return the programs of a
  training step; `separation` and `coupling` say how it computes its loss.
* `read_trace` reads a trace of `jax.profiler`; `waterfall` uses its measured times with the program
  to show where the time of a step went.
* `target_mesh("h100:8x8", "fsdp=64")` returns devices that programs can be compiled for without
  having them. `target_options` returns the compiler options of their chip, which a step built for
  them already has.

Start with `transfers.py`, which finds the collectives and decides whether they are hidden.
`parse.py` reads the text, `computations.py` follows its control flow, `flops.py` computes its cost,
and `ledger.py` adds up.
"""

from ..core.tree import bytes_per_device as bytes_per_device
from ..core.tree import device_bytes as device_bytes
from ..mesh.chips import MACHINES as MACHINES
from ..mesh.chips import Machine as Machine
from ..mesh.chips import machine_of as machine_of
from ..mesh.targets import Target as Target
from ..mesh.targets import missing_compiler as missing_compiler
from ..mesh.targets import parse_target as parse_target
from ..mesh.targets import prepare_environment as prepare_environment
from ..mesh.targets import target_options as target_options
from .calls import Recomputed as Recomputed
from .calls import attention_kernels as attention_kernels
from .calls import kernels as kernels
from .calls import recomputed as recomputed
from .claims import expect_bytes as expect_bytes
from .claims import expect_collectives as expect_collectives
from .claims import expect_kernels as expect_kernels
from .computations import carried_bytes as carried_bytes
from .flops import Flops as Flops
from .flops import flops as flops
from .ledger import Collective as Collective
from .ledger import Ledger as Ledger
from .ledger import ring_bytes as ring_bytes
from .model_time import ModelTime as ModelTime
from .model_time import model_time as model_time
from .parse import Module as Module
from .parse import as_module as as_module
from .report import LeafBytes as LeafBytes
from .report import MemoryReport as MemoryReport
from .report import Report as Report
from .report import leaf_bytes as leaf_bytes
from .report import leaf_table as leaf_table
from .report import memory as memory
from .report import report as report
from .report import target_devices as target_devices
from .report import target_mesh as target_mesh
from .steps import coupling as coupling
from .steps import lower_init as lower_init
from .steps import lower_outer_steps as lower_outer_steps
from .steps import separation as separation
from .steps import trace_outer_steps as trace_outer_steps
from .steps import trace_step as trace_step
from .timeline import Event as Event
from .timeline import read_trace as read_trace
from .transfers import collectives as collectives
from .waterfall import LostLine as LostLine
from .waterfall import LostTime as LostTime
from .waterfall import Waterfall as Waterfall
from .waterfall import waterfall as waterfall
