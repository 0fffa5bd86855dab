"""Layers for strategies: tensor-parallel layers, attention, LoRA; and rematerialisation.

Start reading in `linear.py` and `layout.py`. The layers of this package's own models are in
`models`; units and scans over layers are in `ir`.
"""

from ..core.modules import wrap_calls as wrap_calls
from ..ir.layer_scan import find_chains as find_chains
from ..ir.layer_scan import scan_over_layers as scan_over_layers
from ..ir.units import GATHER as GATHER
from ..ir.units import IsUnit as IsUnit
from ..ir.units import RematPolicy as RematPolicy
from ..ir.units import block_classes as block_classes
from ..ir.units import block_paths as block_paths
from ..ir.units import check_some as check_some
from ..ir.units import is_inside as is_inside
from ..ir.units import mark_units as mark_units
from ..ir.units import units_of as units_of
from ..ops.linear_loss import linear_cross_entropy as linear_cross_entropy
from ..ops.linear_loss import linear_scores as linear_scores
from ..ops.ring import Ring as Ring
from ..ops.ring import ring_attention as ring_attention
from ..ops.ring import ulysses_attention as ulysses_attention
from .attention import TensorParallelAttention as TensorParallelAttention
from .attention import attended as attended
from .attention import call_attend as call_attend
from .attention import check_attend as check_attend
from .attention import has_residual_method as has_residual_method
from .attention import mixes as mixes
from .attention import softmax_attention as softmax_attention
from .attention_kind import AttentionKind as AttentionKind
from .attention_kind import Unread as Unread
from .attention_kind import differs_by_heads as differs_by_heads
from .attention_kind import kind_of as kind_of
from .layout import Axes as Axes
from .layout import Layout as Layout
from .layout import constrain as constrain
from .layout import manual_axes as manual_axes
from .linear import ColumnParallelLinear as ColumnParallelLinear
from .linear import ParallelMLP as ParallelMLP
from .linear import ParallelMode as ParallelMode
from .linear import RowParallelLinear as RowParallelLinear
from .linear import VocabParallelEmbedding as VocabParallelEmbedding
from .linear import own_rows as own_rows
from .linear import taken_rows as taken_rows
from .linear import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from .lora import is_tied as is_tied
from .lora import lora as lora
from .lora import merge_lora as merge_lora
from .remat import POLICIES as POLICIES
from .remat import SUMS as SUMS
from .remat import ActivationCheckpointing as ActivationCheckpointing
from .remat import by_class as by_class
from .remat import summed as summed

roll = scan_over_layers
"""The name that `scan_over_layers` had in version 0.1."""
