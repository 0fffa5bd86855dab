"""The independent witness: what a compiled step sends, stores and computes on each device.

Strategies claim; this room reads the optimised program that will run, and nothing else: it knows
no strategy. `hlo` reads the text, and this room judges it by the rates of `hardware`.

* `collectives` lists what is sent, over which mesh axis, how often, and whether compute hides it;
  `expect_collectives` and `expect_bytes` turn that into tests.
* `memory` asks the compiler for bytes per device; `device_bytes` measures what arrays occupy.
* `carried_bytes` is what a loop keeps from turn to turn, such as the sum of gradients.
* `kernels` counts the custom calls, fused attention among them, and `expect_kernels` turns that
  into tests; `recomputed` is what XLA rematerialises of its own accord.
* `flops` counts matrix operations with the trip counts of loops.
* `report` joins the three.
* `target_mesh("h100:8x8", "fsdp=64")` gives devices to compile for that are not here, and
  `target_options` the compiler options of their chip, which a step built for them has already.

Start reading in `hlo.py`, which shows the order of things: of the room `hlo`, `parse.py` reads the
text, `walk.py` follows its control flow, `transfers.py` finds the collectives and `groups.py` names
their axes; here `overlap.py` judges what hides them, and `ledger.py` adds up.
"""

from ..hardware import MACHINES as MACHINES
from ..hardware import Machine as Machine
from ..hardware import Target as Target
from ..hardware import machine_of as machine_of
from ..hardware import missing_compiler as missing_compiler
from ..hardware import parse_target as parse_target
from ..hardware import prepare_environment as prepare_environment
from ..hardware import target_options as target_options
from ..hlo import Module as Module
from ..hlo import as_module as as_module
from .carried import carried_bytes as carried_bytes
from .collective import Collective as Collective
from .collective import ring_bytes as ring_bytes
from .devices import target_devices as target_devices
from .devices import target_mesh as target_mesh
from .expect import expect_bytes as expect_bytes
from .expect import expect_collectives as expect_collectives
from .flops import Flops as Flops
from .flops import flops as flops
from .hlo import collectives as collectives
from .kernels import Recomputed as Recomputed
from .kernels import attention_kernels as attention_kernels
from .kernels import expect_kernels as expect_kernels
from .kernels import kernels as kernels
from .kernels import recomputed as recomputed
from .ledger import Ledger as Ledger
from .memory import LeafBytes as LeafBytes
from .memory import MemoryReport as MemoryReport
from .memory import bytes_per_device as bytes_per_device
from .memory import device_bytes as device_bytes
from .memory import leaf_bytes as leaf_bytes
from .memory import leaf_table as leaf_table
from .memory import memory as memory
from .report import Report as Report
from .report import report as report
