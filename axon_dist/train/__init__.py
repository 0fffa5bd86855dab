"""The command `axon`: its verbs, its configs, the runs that they describe, and the training loop.

The library below (`axon_dist.step`, `axon_dist.parallel` and the others) does not import this
package. Start reading in `cli/verbs.py`, or in `app/training.py` for the way from a config to a
run. `axon_dist.train` also exports the names of `step` that a training program needs.
"""

from ..core.lazy import names_of_stub

__getattr__, __dir__ = names_of_stub(__name__, __file__)
