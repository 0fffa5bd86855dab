"""Sharding policies: pure functions from path, shape and mesh to a PartitionSpec.

They need no device. Imports `core`. Start reading in `policy.py`; `explain` shows the decisions and
checks that arrays follow them.
"""

from ..core.tree import shard_bytes as shard_bytes
from .apply import Copies as Copies
from .apply import Explanation as Explanation
from .apply import InPlaceOf as InPlaceOf
from .apply import LeafDecision as LeafDecision
from .apply import ShardSpec as ShardSpec
from .apply import WithMoments as WithMoments
from .apply import explain as explain
from .apply import explain_optimizer as explain_optimizer
from .apply import optimizer_decisions as optimizer_decisions
from .apply import optimizer_shardings as optimizer_shardings
from .apply import put as put
from .apply import shardings as shardings
from .apply import specs as specs
from .apply import spread as spread
from .padding import Padding as Padding
from .policy import ByRule as ByRule
from .policy import Decision as Decision
from .policy import FromMetadata as FromMetadata
from .policy import HasShape as HasShape
from .policy import LargestDim as LargestDim
from .policy import Merge as Merge
from .policy import Policy as Policy
from .policy import Replicate as Replicate
from .policy import Wrapped as Wrapped
from .policy import annotations_of as annotations_of
from .policy import axes_of as axes_of
from .policy import per_layer_policy as per_layer_policy
from .policy import shard_count as shard_count
from .policy import spec_axes as spec_axes
from .policy import spec_of as spec_of
