"""Launches runs of many processes: ranks, rendezvous, and handling of lost processes.

`environment.py` reads environment variables into a `LaunchSpec`, `distributed.py` starts
`jax.distributed` from it, and `watchdog.py` ends a run when a process is lost. Imports only `core`.
"""

from .distributed import LAUNCH_TIMEOUT as LAUNCH_TIMEOUT
from .distributed import SILENCE_TIMEOUT as SILENCE_TIMEOUT
from .distributed import STEP_TIMEOUT as STEP_TIMEOUT
from .distributed import Timeouts as Timeouts
from .distributed import initialize as initialize
from .distributed import leave as leave
from .distributed import leave_after as leave_after
from .environment import LaunchSpec as LaunchSpec
from .environment import from_env as from_env
from .hosts import attach as attach
from .hosts import launch_hosts as launch_hosts
from .hosts import read_hosts as read_hosts
from .local import ELASTIC as ELASTIC
from .local import INTERRUPTED as INTERRUPTED
from .local import MEMORY as MEMORY
from .local import PLANNED as PLANNED
from .local import LaunchPlan as LaunchPlan
from .local import launch as launch
