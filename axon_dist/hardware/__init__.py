"""One table of chips: rates, memory, links, wiring, and what to compile with for each.

Imports `core`, and of `hlo` the groups that talk. Start reading in `chips.py`, then `targets.py`.
"""

from .chips import HARDWARE as HARDWARE
from .chips import MACHINES as MACHINES
from .chips import Hardware as Hardware
from .chips import Machine as Machine
from .chips import Wiring as Wiring
from .chips import hardware as hardware
from .chips import machine_of as machine_of
from .chips import option_names as option_names
from .chips import parse_cluster as parse_cluster
from .compilers import missing_compiler as missing_compiler
from .compilers import prepare_environment as prepare_environment
from .targets import Target as Target
from .targets import parse_target as parse_target
from .targets import target_options as target_options
