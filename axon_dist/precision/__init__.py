"""Dtypes of a step, and the loss scale that half precision needs.

Imports `core`. Start reading in `policy.py`.
"""

from .clipping import clip_by_global_norm as clip_by_global_norm
from .fp8 import Fp8Dot as Fp8Dot
from .fp8 import Fp8Layers as Fp8Layers
from .fp8 import fp8_layers as fp8_layers
from .fp8 import fp8_reasons as fp8_reasons
from .int8 import Int8 as Int8
from .int8 import Int8Form as Int8Form
from .int8 import as_values as as_values
from .int8 import int8_form as int8_form
from .int8 import narrowed as narrowed
from .int8 import widened as widened
from .policy import MixedPrecision as MixedPrecision
from .policy import autocast as autocast
from .policy import cast_floating as cast_floating
from .policy import floating_dtype as floating_dtype
from .policy import without_gathers as without_gathers
from .scaler import GradScaler as GradScaler
from .scaler import ScalerState as ScalerState
from .scaler import all_finite as all_finite
from .scaler import keep_if as keep_if
