"""Meshes: the spec of named axes, the world of devices, and the groups that communicate.

`MeshSpec` never needs a device. Other packages list devices only through this one. Start
reading in `mesh_spec.py`, then `world.py`. `chips.py` is the table of chips, and `targets.py` names
machines to compile for. `agreement.py` checks that all processes were started with the same
arguments, and names one that hangs. How processes find each other is in `launch`.
"""

from ..launch import LAUNCH_TIMEOUT as LAUNCH_TIMEOUT
from ..launch import SILENCE_TIMEOUT as SILENCE_TIMEOUT
from ..launch import STEP_TIMEOUT as STEP_TIMEOUT
from ..launch import LaunchPlan as LaunchPlan
from ..launch import LaunchSpec as LaunchSpec
from ..launch import Timeouts as Timeouts
from ..launch import from_env as from_env
from ..launch import initialize as initialize
from ..launch import launch as launch
from ..launch import leave as leave
from .agreement import agree as agree
from .agreement import check_shared as check_shared
from .agreement import checksums as checksums
from .agreement import digest as digest
from .agreement import from_main as from_main
from .agreement import rank_table as rank_table
from .agreement import self_test as self_test
from .agreement import watch_steps as watch_steps
from .chips import option_names as option_names
from .chips import options_row_of as options_row_of
from .group import ProcessGroup as ProcessGroup
from .mesh_spec import AXIS_ORDER as AXIS_ORDER
from .mesh_spec import SLOW_AXES as SLOW_AXES
from .mesh_spec import AxesLike as AxesLike
from .mesh_spec import MeshSpec as MeshSpec
from .targets import Target as Target
from .targets import parse_target as parse_target
from .targets import prepare_environment as prepare_environment
from .world import GROUP as GROUP
from .world import Backend as Backend
from .world import World as World
from .world import abstract_world as abstract_world
from .world import build_mesh as build_mesh
from .world import is_abstract as is_abstract
from .world import process_index as process_index
