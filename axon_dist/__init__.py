"""axon_dist: train any Flax model on many devices with one jitted step, equal to one device.

Start with `World`, choose a strategy such as `fsdp`, and give both to `build_train_step`.
`__init__.pyi` lists the public names and the modules that define them; a name is imported when it
is first used. `dir(axon_dist)` and `from axon_dist import *` have only those that most programs
need: others, such as `rank` and `shift`, would hide common names.
"""

from .core.lazy import names_of_stub

__version__ = "0.2.0"

__getattr__, __dir__ = names_of_stub(__name__, __file__)
