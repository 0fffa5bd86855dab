"""Optimizers that need whole matrices, and optimizers that wrap others.

Start reading in `muon.py`; `step/optimizer.py` distributes its matrices over devices. The
optimizers that a config can name are in `train/config/optimizers.py`.
"""

from .muon import NewtonSchulz as NewtonSchulz
from .muon import hidden_matrices as hidden_matrices
from .muon import muon as muon
from .wrappers import Spikes as Spikes
from .wrappers import by_path as by_path
from .wrappers import matrices as matrices
from .wrappers import watched as watched
