"""Every error a user can get. Messages say what was got, what must hold and what to do."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import importlib
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar


class AxonDistError(Exception):
    """The root of all errors of this library: `except AxonDistError` catches them all.

    Args:
        *args: the message.
        code: a short name of the problem for programs to compare; messages may change.
    """

    code: str

    def __init__(self, *args: object, code: str = ""):
        super().__init__(*args)
        self.code = code


class ConfigError(AxonDistError, ValueError):
    """A configuration has an unknown key, a wrong type or an impossible value."""


class MeshError(AxonDistError, ValueError):
    """A mesh does not fit the devices, or has no such axis."""


class GroupError(AxonDistError, ValueError):
    """A process group is malformed, or a rank or root is not a member."""


class DivisibilityError(AxonDistError, ValueError):
    """An array dimension does not divide by the size of the mesh axis that splits it."""


class DTypeError(AxonDistError, TypeError):
    """An operation is not defined for a dtype, such as the mean of integers."""


class StrategyConflictError(AxonDistError, ValueError):
    """Two strategies split the same dimension of an array, or have conflicting settings."""


class ClaimError(AxonDistError, RuntimeError):
    """A built step violates what its strategy claims, for example its bytes per device."""


class ScheduleError(AxonDistError, ValueError):
    """A pipeline table is not a legal schedule; the message shows the grid with the cell marked."""


class NoAttributeError(AxonDistError, AttributeError):
    """An object has no attribute of that name; the message suggests the right one."""


class UnsupportedError(AxonDistError, ValueError):
    """The platform or the model cannot do what was asked for; nothing degrades silently."""


class OutOfMemoryError(AxonDistError, MemoryError):
    """A device has no memory left; the message says what to change."""


class NonfiniteError(AxonDistError, ArithmeticError):
    """A loss or a gradient is not finite, and the run stops there."""


class CheckpointError(AxonDistError, ValueError):
    """A checkpoint is unfinished, damaged, or belongs to another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is unfinished or corrupted; another one may be good.

    An intact checkpoint of another model raises a plain `CheckpointError`, because no older one
    would fit either.
    """


class StoreError(AxonDistError, RuntimeError):
    """A bucket cannot be reached, or refuses a request."""


class LaunchError(AxonDistError, ValueError):
    """The environment describes an impossible or incomplete set of processes."""


class BackendStartedError(AxonDistError, RuntimeError):
    """JAX has already started its backend, so its number of devices can no longer change."""


MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)
"""The exceptions that malformed data of a file or a network peer raises in Python."""

AXIS_SYNONYMS: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {
        "dp": ("data", "batch", "replica", "data_parallel", "x"),
        "tp": ("model", "tensor", "mp", "mdl", "model_parallel", "y"),
        "pp": ("pipe", "pipeline", "stage", "stages"),
        "cp": ("seq", "sequence", "context", "sp"),
        "ep": ("expert", "experts"),
        "fsdp": ("shard", "sharded"),
        "nodes": ("node", "hosts", "host"),
    }
)
"""The names that other libraries use for each mesh axis."""

_ALSO_CALLED: MappingProxyType[str, str] = MappingProxyType(
    {
        **{name: axis for axis, names in AXIS_SYNONYMS.items() for name in names},
        "lr": "learning_rate",
        **dict.fromkeys(("epochs", "max_steps", "num_steps", "iterations"), "steps"),
        "batch_size": "global_batch",
        **dict.fromkeys(("--max-tokens", "--max-new-tokens", "--length"), "--tokens"),
    }
)
"""Other libraries' names of mesh axes, config keys and options, too different for `difflib`."""


def did_you_mean(name: str, valid: Iterable[str], guesses: bool = True) -> str:
    """Returns a sentence that names the nearest valid spelling and lists all of them.

    Args:
        name: what the user wrote.
        valid: the names that would have been right.
        guesses: whether to name the nearest; not if the name has a meaning that none of them has.

    Returns:
        The text to append to an error message; it starts with a space.

    Example:
        >>> did_you_mean("fdsp", ["dp", "fsdp", "tp"])
        " Did you mean 'fsdp'? Valid: dp, fsdp, tp."
        >>> did_you_mean("data", ["dp", "tp"])
        " Did you mean 'dp'? Valid: dp, tp."
    """
    options = sorted(str(option) for option in valid)
    near = [meant] if (meant := _ALSO_CALLED.get(str(name))) in options else []
    if guesses and not near:
        near = difflib.get_close_matches(str(name), options, n=1, cutoff=0.5)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    return f"{guess} Valid: {', '.join(options)}."


def install_command(extra: str) -> str:
    """The command that installs an extra of this package from the package's own origin.

    Args:
        extra: its name in `pyproject.toml`, such as `plots`.
    """
    folder = pathlib.Path(__file__).parents[2]
    if (folder / "pyproject.toml").is_file():
        return f"pip install -e '{folder}[{extra}]'"
    return f"pip install 'axon_dist[{extra}]'"


@contextlib.contextmanager
def reworded(
    what: str,
    advice: str,
    kind: type[AxonDistError] = ConfigError,
    of: type[Exception] | tuple[type[Exception], ...] = OSError,
) -> Iterator[None]:
    """Rewords errors of its body as one sentence; errors of this library pass unchanged.

    Args:
        what: the start of the sentence: what failed.
        advice: the end of the sentence: what to do.
        kind: the error to raise.
        of: the errors to reword.

    Raises:
        AxonDistError: of type `kind`, with the reason between `what` and `advice`.

    Example:
        >>> with reworded("no numbers", "write digits", of=ValueError):
        ...     int("one")
        Traceback (most recent call last):
        axon_dist.core.errors.ConfigError: no numbers: invalid literal ...; write digits
    """
    try:
        yield
    except AxonDistError:
        raise
    except of as error:
        # str() of a KeyError is only the key.
        text = repr(error) if isinstance(error, KeyError) else str(error) or repr(error)
        reason = getattr(error, "strerror", None) or text.rstrip(".")
        raise kind(f"{what}: {reason:.400}; {advice}") from error


def require(
    name: str,
    extra: str,
    purpose: str,
    otherwise: str = "",
    error: type[AxonDistError] = ConfigError,
) -> Any:
    """Imports an optional module.

    Args:
        name: the module's name.
        extra: the extra of this package that includes it.
        purpose: the start of the message: what needs the module.
        otherwise: the end of the message: an alternative.
        error: the error to raise.

    Returns:
        The module.

    Raises:
        ConfigError: if the module is not installed (or `error`, if given); the message has the
            command that installs it.

    Example:
        >>> require("json", "plots", "a plot").__name__
        'json'
    """
    try:
        return importlib.import_module(name)
    except ImportError as cause:
        raise error(
            f"{purpose} needs the module {cause.name or name!r}, which is not installed; "
            f"run: {install_command(extra)}{otherwise}"
        ) from cause


def unknown(cls: type[enum.Enum], value: object) -> ConfigError:
    """The error about a value that is not a member of an enum."""
    names = [str(member.value) for member in cls]
    hint = did_you_mean(str(value), names)
    return ConfigError(f"{cls.__name__} got {value!r:.80}, and has no such member.{hint}")


if TYPE_CHECKING:
    _Choice = enum.EnumType
else:

    class _Choice(enum.EnumType):
        def __call__(cls, value, *args, **kwargs):
            # Enum compares a value without a hash to every member, which an array cannot answer.
            if not args and not kwargs and type(value).__hash__ is None:
                raise unknown(cls, value)
            return super().__call__(value, *args, **kwargs)


class NamedChoice(enum.StrEnum, metaclass=_Choice):
    """A `StrEnum` whose members are looked up by their values, in upper or lower case.

    Raises:
        ConfigError: for any other value.
    """

    @classmethod
    def named(cls, value: object) -> Self | None:
        """Returns the member of a value in upper or lower case; None for any other value."""
        text = value.lower() if isinstance(value, str) else None
        return next((member for member in cls if member.value.lower() == text), None)

    @classmethod
    def _missing_(cls, value: object) -> Any:
        if (member := cls.named(value)) is None:
            raise unknown(cls, value)
        return member


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Requirement(Generic[T]):
    """A named rule with its check.

    Args:
        name: what must hold, in a few words.
        check: raises an `AxonDistError` if it does not hold.
    """

    name: str
    check: Callable[[T], object]

    @classmethod
    def row(
        cls,
        name: str,
        error: type[AxonDistError],
        sentence: str,
        when: Callable[[T], Mapping[str, object] | None],
        *,
        code: str,
    ) -> Requirement[T]:
        """A requirement given by its message and the condition that breaks it.

        Args:
            name: what must hold, in a few words.
            error: the error to raise.
            sentence: the message, with names in braces.
            when: returns the values of these names if the requirement is broken, else None.
            code: the code of the error.

        Example:
            >>> even = Requirement.row(
            ...     "even",
            ...     AxonDistError,
            ...     "got {n}",
            ...     lambda n: {"n": n} if n % 2 else None,
            ...     code="odd",
            ... )
            >>> even.check(2)
        """

        def check(subject: T) -> None:
            values = when(subject)
            if values is not None:
                raise error(sentence.format(**values), code=code)

        return cls(name, check)


def check_all(rules: tuple[Requirement[T], ...], subject: T) -> None:
    """Raises the error of the first requirement that does not hold."""
    for rule in rules:
        rule.check(subject)


class AxonDistWarning(UserWarning):
    """A warning of this library.

    Args:
        *args: the message.
        code: a short name of the problem for programs to compare; messages may change.
    """

    code: str

    def __init__(self, *args: object, code: str = ""):
        super().__init__(*args)
        self.code = code


def warn(message: str, *, code: str = "") -> None:
    """Warns at the line of the innermost caller outside this package and JAX.

    Args:
        message: what happens, why it may be wrong, and what to do.
        code: a short name of the problem.
    """
    internal = ("axon_dist.", "jax.")
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(internal):
        frame = frame.f_back
        level += 1
    warnings.warn(AxonDistWarning(message, code=code), stacklevel=level)
