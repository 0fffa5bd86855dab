"""`WeightRule` and `WeightRules`: a table that maps tensors of files to parameters of a model."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ..core.errors import ConfigError, reworded
from ..core.renamed import renamed_fields
from ..core.typing import Path, Shape
from ..core.words import first_few, ranges

_TOKEN = re.compile(r"\(|\)|[a-z]\w*")
_DIM = re.compile(r"\(([^()]+)\)|([a-z]\w*)")

Side = tuple[tuple[str, ...], ...]
"""The named dims of one side of a form; each inner tuple is merged into one dim of the array."""


@dataclasses.dataclass(frozen=True)
class Form:
    """A rearrangement of dims in the notation of einops: `"out in -> in out"` transposes.

    Dims in parentheses are merged into one dim, in which the last of them varies fastest. Values do
    not change, so swapping the two sides gives the inverse.

    Args:
        text: both sides; an empty text leaves arrays of any shape unchanged.
        sizes: the sizes of dims that cannot be inferred from shapes.

    Raises:
        ConfigError: when the text cannot be parsed, or its sides have different names.

    Example:
        >>> pairs_apart = Form("(head pair two) d -> d (head two pair)", {"two": 2, "head": 1})
        >>> pairs_apart.apply(np.arange(4)[:, None]).tolist()
        [[0, 2, 1, 3]]
    """

    text: str = ""
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.text:
            return
        if self.text.count("->") != 1:
            raise ConfigError(
                f"the form {self.text!r} must have two sides, as in 'a b -> b a'", code="form-sides"
            )
        left, right = ([name for group in side for name in group] for side in self._sides)
        if sorted(left) != sorted(right) or len(set(left)) < len(left) or not left:
            raise ConfigError(
                f"the form {self.text!r} must name every dim once on each side, as in "
                "'out in -> in out'",
                code="form-names",
            )

    @property
    def inverse(self) -> Form:
        """The form that maps a parameter back to its tensor."""
        before, _, after = self.text.partition("->")
        return Form(f"{after.strip()} -> {before.strip()}" if before else "", self.sizes)

    def shape_of(self, shape: Shape) -> Shape:
        """Returns the shape of the result for an array of this shape.

        Raises:
            ConfigError: when the shape does not fit; `fault` returns the reason instead.
        """
        if not self.text:
            return tuple(shape)
        sizes = self._bind(shape)
        return tuple(math.prod(sizes[name] for name in group) for group in self._sides[1])

    def fault(self, shape: Shape) -> str | None:
        """Returns why arrays of this shape cannot be rearranged, or None if they can."""
        try:
            self.shape_of(shape)
        except ConfigError as error:
            return str(error)
        return None

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Rearranges an array; returns a view if possible."""
        return self._spread(array).reshape(self.shape_of(array.shape))

    def take(self, array: np.ndarray, index: Sequence[slice]) -> np.ndarray:
        """Equals `apply(array)[index]`, but reads only that part of the array.

        Args:
            array: an array, for example mapped from a file.
            index: a slice with start and stop for every dim of the result.
        """
        if not self.text:
            return array[tuple(index)]
        spread = self._spread(array)
        groups = self._sides[1]
        if all(len(group) == 1 for group in groups):
            return spread[tuple(index)]
        sizes = self._bind(array.shape)
        picked: list[np.ndarray] = []
        for number, (group, part) in enumerate(zip(groups, index, strict=True)):
            within = np.unravel_index(
                np.arange(part.start, part.stop), [sizes[name] for name in group]
            )
            others = (1,) * (len(groups) - 1 - number)
            picked += [which.reshape(-1, *others) for which in within]
        return spread[tuple(picked)]

    @property
    def leading(self) -> int:
        """The dim of the result whose index varies slowest in the file."""
        if not self.text:
            return 0
        first = self._sides[0][0][0]
        return next(dim for dim, group in enumerate(self._sides[1]) if first in group)

    @property
    def _sides(self) -> tuple[Side, Side]:
        left, right = self.text.split("->")
        return _groups(left), _groups(right)

    def _spread(self, array: np.ndarray) -> np.ndarray:
        """Returns a view of the array with one dim per name, in the order of the result."""
        if not self.text:
            return array
        sizes = self._bind(array.shape)
        left, right = self._sides
        names = [name for group in left for name in group]
        wanted = [name for group in right for name in group]
        return array.reshape([sizes[n] for n in names]).transpose([names.index(n) for n in wanted])

    def _bind(self, shape: Shape) -> dict[str, int]:
        left = self._sides[0]
        if len(left) != len(shape):
            raise ConfigError(
                f"the form {self.text!r} has {len(left)} dims, but the array has the shape "
                f"{list(shape)}",
                code="form-dims",
            )
        sizes = dict(self.sizes)
        for group, size in zip(left, shape, strict=True):
            known = math.prod(sizes[name] for name in group if name in sizes)
            unknown = [name for name in group if name not in sizes]
            if len(unknown) > 1:
                raise ConfigError(f"the form {self.text!r} needs sizes={{{unknown[0]!r}: ...}}")
            if (size % known if unknown else size != known) or not known:
                raise ConfigError(
                    f"the form {self.text!r} with {dict(self.sizes)} does not fit {list(shape)}"
                )
            sizes |= {name: size // known for name in unknown}
        return sizes


def _groups(side: str) -> Side:
    """Parses one side, such as `"(head size) d"`."""
    if _TOKEN.sub("", side).strip():
        raise ConfigError(f"cannot read {side.strip()!r} in a form; write 'name (name name)'")
    groups = tuple(tuple((inside or name).split()) for inside, name in _DIM.findall(side))
    if _DIM.sub("", side).strip() or () in groups:
        raise ConfigError(
            f"the parentheses in {side.strip()!r} are empty or not balanced",
            code="form-parentheses",
        )
    return groups


_GROUP = re.compile(r"\(\?P<(\w+)>([^()]*)\)")
_OPTIONAL = re.compile(r"\(\?:([^()|]*)\)\?")
_IS_PATTERN = re.compile(r"(?<!\\)[.^$*+?{}\[\]|()]|\\[a-zA-Z0-9]")
_FIELD = re.compile(r"\{(\w+)\}")
"""A replacement field of a path, such as `{layer}`."""


@renamed_fields(parts="split_sizes")
@dataclasses.dataclass(frozen=True)
class WeightRule:
    r"""One row of the table: names of tensors, paths of parameters, and how to convert them.

    A rule with several names concatenates their tensors into one parameter; a rule with several
    paths splits one tensor. With `stack`, the tensors of all layers are the rows of one parameter,
    as in a model that scans its layers.

    Args:
        names: regular expressions of whole names; named groups such as `(?P<layer>\d+)` are layer
            indices. For writing, the rest must be literal text with escaped dots, or optional text
            such as `(?:model\.)?`, which is written.
        paths: paths of parameters with these groups, such as `"blocks/{layer}/mlp/up/kernel"`.
        form: maps the dims of a tensor to those of the parameter, as in `"out in -> in out"`.
        sizes: the sizes of dims in `form` that cannot be inferred from shapes.
        dim: the dim of the parameter along which tensors are concatenated; or the dim, after
            `form`, along which a tensor is split.
        stack: a group that the paths lack; its values index dim 0 of the parameter. Several groups
            index its first dims.
        split_sizes: the lengths of the concatenated tensors along `dim`, for splitting the
            parameter when it is written; None for equal lengths.

    Example:
        >>> rule = WeightRule(
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
    stack: str | tuple[str, ...] | None = None
    split_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for field in ("names", "paths"):
            value = getattr(self, field)
            object.__setattr__(self, field, (value,) if isinstance(value, str) else tuple(value))

    @property
    def stacked(self) -> tuple[str, ...]:
        """The groups whose values index the first dims of the parameter."""
        return (self.stack,) if isinstance(self.stack, str) else self.stack or ()

    @property
    def as_form(self) -> Form:
        """The parsed form."""
        return Form(self.form, self.sizes)

    def validate(self) -> None:
        """Checks that names, paths and form are consistent.

        Raises:
            ConfigError: the rule is inconsistent; the message names it.
        """
        if not self.names or not self.paths or (len(self.names) > 1 and len(self.paths) > 1):
            raise ConfigError(
                f"{self} has {len(self.names)} names and {len(self.paths)} paths; give one name, "
                "or one path"
            )
        _ = self.as_form
        if self.dim < 0:
            raise ConfigError(f"{self} has dim={self.dim}; count dims from 0")
        if self.split_sizes is not None and len(self.split_sizes) != len(self.names):
            raise ConfigError(
                f"{self} has split_sizes={self.split_sizes}; give a length for each name"
            )
        for name in self.names:
            self._check_groups(name)

    def _check_groups(self, name: str) -> None:
        groups = set(_compiled(name, self).groupindex)
        for group in self.stacked:
            if group not in groups:
                raise ConfigError(f"{self}: the name {name!r} has no group {group!r} to stack")
        groups -= {*self.stacked}
        for path in self.paths:
            fields = set(_FIELD.findall(path))
            if fields != groups:
                raise ConfigError(
                    f"{self}: the path {path!r} has the fields {sorted(fields)}, but the name "
                    f"{name!r} has the groups {sorted(groups)}; they must be the same",
                    code="rule-groups-differ",
                )

    def match(self, name: str) -> tuple[int, dict[str, str]] | None:
        """Returns the index of the matching name and its groups; None if no name matches."""
        for number, pattern in enumerate(self.names):
            if hit := _compiled(pattern, self).fullmatch(name):
                return number, hit.groupdict()
        return None

    def paths_of(self, groups: Mapping[str, str]) -> tuple[Path, ...]:
        """Returns the paths of the parameters for these values of the groups."""
        return tuple(path.format_map(groups) for path in self.paths)

    def groups_of(self, path: Path) -> tuple[int, dict[str, str]] | None:
        """Inverts `paths_of`: returns the index of the matching path and its groups."""
        inside = dict(_GROUP.findall(self.names[0]))
        for number, template in enumerate(self.paths):
            parts = _FIELD.split(template)
            texts = [re.escape(part) for part in parts[::2]]
            groups = [f"(?P<{name}>{inside.get(name, '[^/]+')})" for name in parts[1::2]]
            pattern = "".join(a + b for a, b in zip(texts, [*groups, ""], strict=True))
            if hit := re.fullmatch(pattern, path):
                return number, hit.groupdict()
        return None

    def name_of(self, number: int, groups: Mapping[str, str]) -> str:
        """Inverts `match`: returns the name of a tensor.

        Args:
            number: the index of the name in `names`.
            groups: the values of its groups.

        Raises:
            ConfigError: when the regular expression matches more than one name.
        """
        written = _OPTIONAL.sub(lambda hit: hit[1], self.names[number])
        texts = _GROUP.split(written)[::3]
        if any(_IS_PATTERN.search(text) for text in texts):
            raise ConfigError(
                f"the name {self.names[number]!r} of a rule matches more than one text, so no "
                "tensor can be written under it; escape dots (\\.), and use only literal text, "
                "named groups and optional text",
                code="rule-name-ambiguous",
            )
        literal = [re.sub(r"\\(.)", r"\1", text) for text in texts]
        values = [groups[name] for name, _ in _GROUP.findall(written)]
        return "".join(a + b for a, b in zip(literal, [*values, ""], strict=True))

    def __str__(self) -> str:
        return f"the rule {' + '.join(self.names)} -> {' + '.join(self.paths)}"


@dataclasses.dataclass(frozen=True)
class WeightRules:
    r"""A table of rules; the first rule that matches a name counts.

    Args:
        rules: the rows.
        ignored: regular expressions of names that may be in a file but belong to no parameter,
            such as masks.
        copies: maps regular expressions of names to names of tensors that these must equal bit for
            bit, such as a head tied to the embeddings. They are checked, and then not used.
        own: regular expressions of paths whose arrays are in no file, because models make them.

    Example:
        >>> WeightRules((WeightRule(r"(?P<path>.+)", "{path}"),)).validate()
    """

    rules: tuple[WeightRule, ...]
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    own: tuple[str, ...] = ()

    def validate(self) -> None:
        """Checks every row.

        Raises:
            ConfigError: a rule is inconsistent; the message names it.
        """
        for rule in self.rules:
            rule.validate()
        for pattern in (*self.ignored, *self.copies, *self.own):
            _compiled(pattern, self)


NATIVE = WeightRules((WeightRule(r"(?P<path>.+)", "{path}"),))
"""The native format: names are the paths of the parameters, and nothing is rearranged."""


def _compiled(pattern: str, owner: object) -> re.Pattern[str]:
    with reworded(f"{owner}: {pattern!r} is not a regular expression", "correct it", of=re.error):
        return re.compile(pattern)


_NUMBER = re.compile(r"(?<!\w)\d+(?!\w)")
_MOST = 8


def shorten(names: Iterable[str]) -> str:
    """Lists names; names that differ only in their numbers are merged.

    Args:
        names: names of tensors, for example.

    Example:
        >>> shorten(["norm", *(f"blocks/{i}/kernel" for i in (0, 1, 2, 5))])
        'norm, blocks/*/kernel (0-2, 5)'
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_NUMBER.sub("*", name), []).append(name)
    listed = [_summary(kind, members) for kind, members in kinds.items()]
    return first_few(listed, _MOST, more=" kinds")


def _summary(kind: str, names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    numbers = [_NUMBER.findall(name) for name in names]
    varying = [column for column in zip(*numbers, strict=True) if len(set(column)) > 1]
    if len(varying) != 1:
        return f"{kind} ({len(names)} of them)"
    return f"{kind} ({ranges(sorted(map(int, varying[0])), ', ')})"
