"""Optimizers that need matrices whole, and how these are distributed over the devices.

Start reading in `muon.py`; `deal.py` is what makes it cost one exchange there and back per kind of
matrix on any mesh. `wrappers.py` has optimizers around others.
"""

from .deal import Distribution as Distribution
from .deal import Distributor as Distributor
from .muon import NewtonSchulz as NewtonSchulz
from .muon import hidden_matrices as hidden_matrices
from .muon import muon as muon
from .wrappers import Spikes as Spikes
from .wrappers import by_path as by_path
from .wrappers import matrices as matrices
from .wrappers import watched as watched
