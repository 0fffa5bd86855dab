"""Dtypes of a step, and the loss scale that half precision needs.

Names of `ops/precision.py`, `ops/fp8.py` and `ops/int8.py`.
"""

from .core.tree import floating_dtype as floating_dtype
from .ops.fp8 import Fp8Dot as Fp8Dot
from .ops.fp8 import Fp8Layers as Fp8Layers
from .ops.fp8 import fp8_layers as fp8_layers
from .ops.fp8 import fp8_reasons as fp8_reasons
from .ops.int8 import Int8 as Int8
from .ops.int8 import Int8Form as Int8Form
from .ops.int8 import as_values as as_values
from .ops.int8 import int8_form as int8_form
from .ops.int8 import narrowed as narrowed
from .ops.int8 import widened as widened
from .ops.precision import GradScaler as GradScaler
from .ops.precision import MixedPrecision as MixedPrecision
from .ops.precision import ScalerState as ScalerState
from .ops.precision import all_finite as all_finite
from .ops.precision import autocast as autocast
from .ops.precision import cast_floating as cast_floating
from .ops.precision import clip_by_global_norm as clip_by_global_norm
from .ops.precision import keep_if as keep_if
from .ops.precision import without_gathers as without_gathers
