"""Weights in and out: safetensors files, under a model's own names or those of a hub.

A table of rules says which tensor is which parameter; reading and writing use the same one. Start
reading in `rule.py`, then `load.py` and `save.py`; `FAMILIES` in `formats.py` has
a row for each family of models that hubs know.
"""

from axon_dist.core.arguments import explain_calls

from .family import Family as Family
from .files import find_tensors as find_tensors
from .formats import FORMATS as FORMATS
from .formats import NATIVE_NAME as NATIVE_NAME
from .formats import format_name as format_name
from .formats import format_of as format_of
from .formats import hub_config as hub_config
from .formats import token_ids as token_ids
from .load import load_weights as load_weights
from .rule import NATIVE as NATIVE
from .rule import Form as Form
from .rule import WeightRule as WeightRule
from .rule import WeightRules as WeightRules
from .save import MAX_FILE as MAX_FILE
from .save import save_adapters as save_adapters
from .save import save_weights as save_weights

Rule = WeightRule  # its name in 0.1
HubFormat = Family  # what a row of `FORMATS` is

explain_calls(globals())
