"""`Rule` and `WeightRules`: which tensor of a file is which parameter of a model, as data."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from ..core.errors import ConfigError
from ..core.typing import Path
from .form import Form

_GROUP = re.compile(r"\(\?P<(\w+)>([^()]*)\)")
_OPTIONAL = re.compile(r"\(\?:([^()|]*)\)\?")
_IS_PATTERN = re.compile(r"(?<!\\)[.^$*+?{}\[\]|()]|\\[a-zA-Z0-9]")
_PLACE = re.compile(r"\{(\w+)\}")


@dataclasses.dataclass(frozen=True)
class Rule:
    r"""One row: names of tensors, paths of parameters, and how the one becomes the other.

    Several names are joined into one parameter; several paths split one tensor; with `stack`, the
    tensors of all layers are the rows of one parameter, as a model has them that scans its layers.

    Args:
        names: regular expressions of whole names; named groups such as `(?P<layer>\d+)` count
            layers. Where a name is to be written as well, the rest is literal text, dots escaped,
            or an optional text such as `(?:model\.)?`, which is written.
        paths: of parameters, such as `"blocks/{layer}/mlp/up/kernel"`, with those groups.
        form: the dims of a tensor -> those of the parameter, such as `"out in -> in out"`.
        sizes: of the dims in `form` that no shape tells.
        dim: the dim of the parameter along which tensors are joined, or the one along which a
            tensor, its dims as those of the parameter, is split.
        stack: a group that no path has; its values count dim 0 of the parameter.
        parts: along `dim`, the lengths of the tensors that are joined, by which a parameter is cut
            again when it is written; None for equal ones.

    Example:
        >>> rule = Rule(
        ...     r"h\.(?P<layer>\d+)\.attn\.weight", ("{layer}/q", "{layer}/k", "{layer}/v"), dim=1
        ... )
        >>> rule.match("h.3.attn.weight")
        (0, {'layer': '3'})
        >>> rule.paths_of({"layer": "3"})
        ('3/q', '3/k', '3/v')
        >>> rule.name_of(0, {"layer": "3"})
        'h.3.attn.weight'
    """

    names: Sequence[str]
    paths: Sequence[str]
    form: str = ""
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
    dim: int = 0
    stack: str | None = None
    parts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for field in ("names", "paths"):
            given = getattr(self, field)
            object.__setattr__(self, field, (given,) if isinstance(given, str) else tuple(given))

    @property
    def as_form(self) -> Form:
        """The form as a value."""
        return Form(self.form, self.sizes)

    def validate(self) -> None:
        """Checks that names, paths and form go together.

        Raises:
            ConfigError: naming the rule and what is wrong with it.
        """
        if not self.names or not self.paths or (len(self.names) > 1 and len(self.paths) > 1):
            raise ConfigError(
                f"{self} has {len(self.names)} names and {len(self.paths)} paths; give one name, "
                "or one path"
            )
        _ = self.as_form
        if self.dim < 0:
            raise ConfigError(f"{self} has dim={self.dim}; count dims from 0")
        if self.parts is not None and len(self.parts) != len(self.names):
            raise ConfigError(f"{self} has parts={self.parts}; give a length for each name")
        for name in self.names:
            self._check_groups(name)

    def _check_groups(self, name: str) -> None:
        groups = set(_compiled(name, self).groupindex)
        if self.stack is not None and self.stack not in groups:
            raise ConfigError(f"{self}: the name {name!r} has no group {self.stack!r} to stack")
        for path in self.paths:
            places = set(_PLACE.findall(path))
            if places != groups - {self.stack}:
                raise ConfigError(
                    f"{self}: the path {path!r} has the places {sorted(places)}, the name {name!r} "
                    f"the groups {sorted(groups - {self.stack})}; they must be the same"
                )

    def match(self, name: str) -> tuple[int, dict[str, str]] | None:
        """Which of its names a name is, and the values of the groups; None if it is none."""
        for number, pattern in enumerate(self.names):
            if found := _compiled(pattern, self).fullmatch(name):
                return number, found.groupdict()
        return None

    def paths_of(self, groups: Mapping[str, str]) -> tuple[Path, ...]:
        """The parameters that tensors with some values of the groups go to."""
        return tuple(path.format_map(groups) for path in self.paths)

    def groups_of(self, path: Path) -> tuple[int, dict[str, str]] | None:
        """The inverse of `paths_of`: which of its paths a path is, and the groups."""
        inside = dict(_GROUP.findall(self.names[0]))
        for number, template in enumerate(self.paths):
            parts = _PLACE.split(template)
            texts = [re.escape(part) for part in parts[::2]]
            places = [f"(?P<{name}>{inside.get(name, '[^/]+')})" for name in parts[1::2]]
            pattern = "".join(a + b for a, b in zip(texts, [*places, ""], strict=True))
            if found := re.fullmatch(pattern, path):
                return number, found.groupdict()
        return None

    def name_of(self, number: int, groups: Mapping[str, str]) -> str:
        """The inverse of `match`.

        Args:
            number: which of its names.
            groups: the values of its groups.

        Raises:
            ConfigError: when the regular expression fits more than one name.
        """
        written = _OPTIONAL.sub(lambda found: found[1], self.names[number])
        texts = _GROUP.split(written)[::3]
        if any(_IS_PATTERN.search(text) for text in texts):
            raise ConfigError(
                f"the name {self.names[number]!r} of a rule fits more than one text, so that "
                "nothing can be written under it; escape dots (\\.), and keep to literal text, "
                "named groups and optional text"
            )
        literal = [re.sub(r"\\(.)", r"\1", text) for text in texts]
        values = [groups[name] for name, _ in _GROUP.findall(written)]
        return "".join(a + b for a, b in zip(literal, [*values, ""], strict=True))

    def __str__(self) -> str:
        return f"the rule {' + '.join(self.names)} -> {' + '.join(self.paths)}"


@dataclasses.dataclass(frozen=True)
class WeightRules:
    r"""A table of rules, read from the top: the first that fits a name counts.

    Args:
        rules: the rows.
        ignored: regular expressions of names that may be in a file and belong to no parameter,
            such as masks.
        copies: by a regular expression of a name, the name of a tensor that it has to repeat bit
            for bit, such as a head tied to the embeddings; checked, and then not used.

    Example:
        >>> WeightRules((Rule(r"(?P<path>.+)", "{path}"),)).validate()
    """

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def validate(self) -> None:
        """Checks every row.

        Raises:
            ConfigError: naming the row and what is wrong with it.
        """
        for rule in self.rules:
            rule.validate()
        for pattern in (*self.ignored, *self.copies):
            _compiled(pattern, self)


NATIVE = WeightRules((Rule(r"(?P<path>.+)", "{path}"),))
"""Names are the paths of the parameters, and nothing is rearranged."""


def _compiled(pattern: str, where: object) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{where}: {pattern!r} is no regular expression: {error}") from error
