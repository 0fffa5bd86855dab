"""One table of chips: rates, memory, links, wiring, and what to compile with for each.

Names of `mesh/chips.py` and `mesh/targets.py`.
"""

from .mesh.chips import HARDWARE as HARDWARE
from .mesh.chips import MACHINES as MACHINES
from .mesh.chips import Hardware as Hardware
from .mesh.chips import Machine as Machine
from .mesh.chips import Wiring as Wiring
from .mesh.chips import hardware as hardware
from .mesh.chips import machine_of as machine_of
from .mesh.chips import option_names as option_names
from .mesh.chips import parse_cluster as parse_cluster
from .mesh.targets import Target as Target
from .mesh.targets import missing_compiler as missing_compiler
from .mesh.targets import parse_target as parse_target
from .mesh.targets import prepare_environment as prepare_environment
from .mesh.targets import target_options as target_options
