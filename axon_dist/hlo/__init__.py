"""Reads compiled programs: instructions, control flow, groups and transfers.

Imports `core` alone. `parse.py` reads the text, `walk.py` follows its control flow, `transfers.py`
finds the collectives, `groups.py` names their axes.
"""

from .parse import Module as Module
from .parse import as_module as as_module
