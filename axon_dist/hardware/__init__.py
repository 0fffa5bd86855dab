"""Chips and machines: rates, memory, links, and how to compile for them.

Imports `core` alone. Start reading in `chips.py`, then `targets.py`.
"""

from .chips import HARDWARE as HARDWARE
from .chips import Hardware as Hardware
from .chips import hardware as hardware
from .chips import parse_cluster as parse_cluster
from .compilers import missing_compiler as missing_compiler
from .compilers import prepare_environment as prepare_environment
from .machine import MACHINES as MACHINES
from .machine import Machine as Machine
from .machine import machine_of as machine_of
from .options import target_options as target_options
from .targets import Target as Target
from .targets import parse_target as parse_target
