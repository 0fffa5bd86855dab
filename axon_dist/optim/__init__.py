"""Optimizers that need whole matrices, AdamW in 8 bits, and optimizers that wrap others.

Start reading in `muon.py`; `step/optimizer.py` distributes its matrices over devices.
`eight_bit.py` stores moments with 8 bits per element. The optimizers that a config can name are in
`train/config/optimizers.py`.
"""

from ..core.renamed import renamed_names as _renamed_names
from .eight_bit import DynamicCode as DynamicCode
from .eight_bit import adamw_8bit as adamw_8bit
from .eight_bit import dequantize as dequantize
from .eight_bit import quantize as quantize
from .eight_bit import scale_by_adam_8bit as scale_by_adam_8bit
from .muon import NewtonSchulz as NewtonSchulz
from .muon import hidden_matrices as hidden_matrices
from .muon import muon as muon
from .wrappers import Spikes as Spikes
from .wrappers import by_path as by_path
from .wrappers import decayed as decayed
from .wrappers import watched as watched

__getattr__ = _renamed_names(__name__, matrices="decayed")
