"""The kinds of arguments that are of this room: groups and worlds."""

from __future__ import annotations

from ..core.errors import GroupError
from ..core.told import Kind
from .group import ProcessGroup
from .world import World

GROUP = Kind(
    'a ProcessGroup, such as world.group("dp")', lambda x: isinstance(x, ProcessGroup), GroupError
)
WORLD = Kind("a World, made by World.init(...) or World.emulate(8)", lambda x: isinstance(x, World))
