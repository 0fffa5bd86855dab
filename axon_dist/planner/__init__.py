"""What a model needs on devices that are not here: bytes, traffic, time, and a plan.

No array is made and no device is asked: of a number of parameters everything follows from formulas
with their papers, of a model from its own program. The compiled step has the last word; `axon
inspect` reads it. Imports `parallel`, `program`, `precision`, `schedule`, `mesh` and `core`. Start
reading in `recommend.py`, then `plan.py`; what a traced step says is in `reading.py`.
"""

from ..mesh.chips import HARDWARE as HARDWARE
from ..mesh.chips import Hardware as Hardware
from ..mesh.chips import hardware as hardware
from ..mesh.chips import parse_cluster as parse_cluster
from .activations import layer_activations as layer_activations
from .activations import step_activations as step_activations
from .arrangement import Apart as Apart
from .arrangement import Arrangement as Arrangement
from .arrangement import arrange as arrange
from .candidates import candidates as candidates
from .cost import StepTime as StepTime
from .cost import estimate_step_time as estimate_step_time
from .cost import idle_share as idle_share
from .decide import Direction as Direction
from .decide import decide as decide
from .lint import Finding as Finding
from .lint import lint as lint
from .memory import OPTIMIZERS as OPTIMIZERS
from .memory import BytesPerParam as BytesPerParam
from .memory import MemoryEstimate as MemoryEstimate
from .memory import ModelSize as ModelSize
from .memory import bytes_per_param as bytes_per_param
from .memory import estimate_memory as estimate_memory
from .memory import model_size as model_size
from .plan import Plan as Plan
from .plan import evaluate as evaluate
from .plan import on_best_schedule as on_best_schedule
from .profile import Profile as Profile
from .profile import workload_of as workload_of
from .quantity import parse_bytes as parse_bytes
from .quantity import parse_count as parse_count
from .quantity import parse_memory as parse_memory
from .reading import Reading as Reading
from .reading import read_program as read_program
from .recommend import Recommendation as Recommendation
from .recommend import recommend as recommend
from .scaling import effective_batch as effective_batch
from .scaling import scale_lr as scale_lr
from .scaling import scaling_efficiency as scaling_efficiency
from .shape import TransformerShape as TransformerShape
from .shape import guess_shape as guess_shape
from .traffic import comm_bytes as comm_bytes
from .traffic import context_bytes as context_bytes
from .traffic import expert_bytes as expert_bytes
from .traffic import pipeline_bytes as pipeline_bytes
from .traffic import sequence_bytes as sequence_bytes
from .traffic import tensor_bytes as tensor_bytes
from .transfer import Transfer as Transfer
from .transfer import transfers as transfers
from .workload import ModelCost as ModelCost
from .workload import Workload as Workload
