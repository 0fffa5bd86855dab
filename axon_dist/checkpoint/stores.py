"""The table of stores; a new way to keep values is a row here."""

from __future__ import annotations

from types import MappingProxyType

from .full import FullStore
from .manifest import StateDictType
from .store import OrbaxStore, Store

STORES: MappingProxyType[StateDictType, Store] = MappingProxyType(
    {StateDictType.FULL: FullStore(), StateDictType.SHARDED: OrbaxStore()}
)
"""Which store writes and reads each type of checkpoint."""
