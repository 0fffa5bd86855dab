"""Loads and saves weights as safetensors files, with the model's own names or a hub's.

A table of rules maps tensors to parameters (`weight_rules.py` in `models`); loading and saving
use the same table. Start reading in `load.py` and `save.py`.
"""

from ..models.family import Family as Family
from ..models.formats import FORMATS as FORMATS
from ..models.formats import NATIVE_NAME as NATIVE_NAME
from ..models.formats import format_of as format_of
from ..models.snapshot import format_name as format_name
from ..models.snapshot import hub_config as hub_config
from ..models.snapshot import token_ids as token_ids
from ..models.weight_rules import NATIVE as NATIVE
from ..models.weight_rules import Form as Form
from ..models.weight_rules import WeightRule as WeightRule
from ..models.weight_rules import WeightRules as WeightRules
from .files import find_tensors as find_tensors
from .load import load_weights as load_weights
from .save import MAX_FILE as MAX_FILE
from .save import save_adapters as save_adapters
from .save import save_weights as save_weights

Rule = WeightRule  # the name in version 0.1
HubFormat = Family  # the type of the values of `FORMATS`
