"""Estimates memory, traffic and time of a model on devices that need not exist here, and plans.

No array is made and no device is used. A candidate is built in an abstract world, its train state
is counted as the sharding policies lay it out, and the rest is read from its traced step. Only the
compiled step is exact; `axon inspect` reads it. Imports `inspect`, `parallel`, `schedule`, `nn`,
`ir`, `ops`, `mesh` and `core`. Start reading in `candidates.py`; `reading.py` reads a traced step.
"""

from ..core.renamed import renamed_names as _renamed_names
from ..mesh.chips import HARDWARE as HARDWARE
from ..mesh.chips import Hardware as Hardware
from ..mesh.chips import hardware as hardware
from ..mesh.chips import parse_cluster as parse_cluster
from .candidates import AXES as AXES
from .candidates import Candidate as Candidate
from .candidates import SlowReplicas as SlowReplicas
from .candidates import Workload as Workload
from .candidates import candidate_for as candidate_for
from .candidates import candidates as candidates
from .candidates import more_microbatches as more_microbatches
from .candidates import workload_of as workload_of
from .reading import Reading as Reading
from .reading import StepCost as StepCost
from .reading import idle_share as idle_share
from .reading import knows_memory as knows_memory
from .reading import read_program as read_program
from .reading import read_step as read_step
from .reading import recompute_least as recompute_least
from .reading import usable_bytes as usable_bytes
from .scaling import Direction as Direction
from .scaling import decide as decide
from .scaling import effective_batch as effective_batch
from .scaling import parse_bytes as parse_bytes
from .scaling import parse_count as parse_count
from .scaling import parse_memory as parse_memory
from .scaling import scale_lr as scale_lr
from .scaling import scaling_efficiency as scaling_efficiency

__getattr__ = _renamed_names(
    __name__, StepTime="StepCost", Arrangement="Candidate", arrange="candidate_for"
)
