"""Checkpoints: written atomically, verified by checksums, restored onto any mesh.

Start reading in `layout.py`, then `save.py`. `manager.py` manages the checkpoints of a run, and
`stores.py` is the only file that uses Orbax and safetensors.
"""

from ..core.errors import DamagedCheckpointError as DamagedCheckpointError
from .host_copies import HostCopies as HostCopies
from .host_copies import HostCopy as HostCopy
from .layout import LeafSpec as LeafSpec
from .layout import Manifest as Manifest
from .layout import StateDictType as StateDictType
from .layout import on_main as on_main
from .layout import step_name as step_name
from .layout import step_of as step_of
from .layout import target_of as target_of
from .manager import CheckpointManager as CheckpointManager
from .manager import Entry as Entry
from .manager import Restored as Restored
from .manager import Retention as Retention
from .save import load_checkpoint as load_checkpoint
from .save import save_checkpoint as save_checkpoint
from .seal import is_checkpoint as is_checkpoint
from .seal import read_manifest as read_manifest
from .stores import TensorEntry as TensorEntry
from .stores import export_safetensors as export_safetensors
from .stores import gather as gather
from .stores import list_tensors as list_tensors
from .stores import open_tensors as open_tensors
from .stores import plan_order as plan_order
from .stores import write_gathered as write_gathered
from .stores import write_tensors as write_tensors
