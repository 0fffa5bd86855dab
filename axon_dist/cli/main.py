"""`axon VERB ...`: parses the arguments, runs the verb, says mistakes in one line."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import NoReturn, TextIO

from axon_dist import __version__
from axon_dist.core.errors import AxonDistError, ConfigError, did_you_mean
from axon_dist.launch import leave, leave_after

from . import (
    completion,
    config,
    data,
    doctor,
    evaluate,
    export,
    generate,
    inspect,
    launch,
    plan,
    report,
    schedule,
    train,
    tune,
    verify,
)
from .verb import Verb

VERBS: tuple[Verb, ...] = (
    train.VERB,
    evaluate.VERB,
    generate.VERB,
    export.VERB,
    report.VERB,
    config.VERB,
    data.VERB,
    plan.VERB,
    inspect.VERB,
    tune.VERB,
    launch.VERB,
    schedule.VERB,
    verify.VERB,
    doctor.VERB,
    completion.VERB,
)
"""Every verb, in the order of `axon --help`."""

_USER_ERROR = 2
_INTERRUPTED = 130
_LONGEST = 2000
"""Letters of a message; the rest of a longer one is what somebody typed."""


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, like every other mistake of a user."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with the message."""
        self.exit(_USER_ERROR, f"axon: error: {one_line(message)}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: what follows `axon`; None takes those of the process.

    Returns:
        The exit code: 0, 2 for a mistake of the user, 130 when interrupted for good, 1 for what
        nobody expected, whose traceback goes to a file, or whatever the verb returns.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if set(os.environ.get("COLUMNS", "1")) == {"0"}:
        # A terminal that does not know its width says so, and nothing would be printed at all.
        del os.environ["COLUMNS"]
    try:
        _check_verb(arguments)
        parsed = _parse(arguments)
        code = parsed.run(parsed)
        sys.stdout.flush()
        return code
    except AxonDistError as error:
        _say(f"error: {one_line(error)}")
        return leave(_USER_ERROR, one_line(error))
    except KeyboardInterrupt:
        _say("interrupted")
        return leave(_INTERRUPTED, "interrupted")
    except BrokenPipeError:
        # Nobody reads what is left to say, which the interpreter must not find out again at exit.
        _silence(sys.stdout)
        return 0
    except Exception as error:
        # JAX adds notes about its own frames.
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("raised by")]
        told = ", ".join([str(error), *notes])
        _say(f"unexpected {type(error).__name__}: {one_line(told)}; {_kept(error)}")
        return leave_after(error)


def one_line(message: object) -> str:
    """A message for people as one line, cut where it is endless.

    Example:
        >>> one_line("no such\\n    file")
        'no such file'
    """
    # Half a letter, as an argument may hold it, cannot be written.
    text = " ".join(str(message).split()).encode(errors="backslashreplace").decode()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _say(text: str) -> None:
    """Writes to the standard error, if that can be written to."""
    with contextlib.suppress(OSError):
        print(f"axon: {text}", file=sys.stderr, flush=True)


def _silence(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _kept(error: Exception) -> str:
    """Writes a traceback into a file, and says where it is."""
    if isinstance(error, OSError):
        # A standard output that is full would be found full again at exit.
        _silence(sys.stdout)
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="axon-", suffix=".txt", delete=False, errors="replace"
        ) as file:
            file.writelines(traceback.format_exception(error))
        return f"its traceback is in {file.name}"
    except OSError:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"at {place.filename}:{place.lineno}"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses, and takes overrides behind options, too, which argparse leaves over."""
    parser = _parser(is_completed=arguments[:1] == [completion.VERB.name])
    parsed, behind = parser.parse_known_args(arguments)
    if behind and (not hasattr(parsed, "overrides") or any(a.startswith("-") for a in behind)):
        parser.error(f"unrecognized arguments: {' '.join(behind)}")
    if behind:
        parsed.overrides = [*parsed.overrides, *behind]
    return parsed


def _check_verb(arguments: Sequence[str]) -> None:
    names = [verb.name for verb in VERBS]
    if not arguments:
        raise ConfigError(f"got no verb.{did_you_mean('', names)} See axon --help")
    if not arguments[0].startswith("-") and arguments[0] not in names:
        raise ConfigError(f"there is no verb {arguments[0]!r}.{did_you_mean(arguments[0], names)}")


def _parser(is_completed: bool = False) -> argparse.ArgumentParser:
    """The parser of all verbs.

    Args:
        is_completed: whether it must say what can follow each verb.
    """
    parser = _Parser(prog="axon", description="Train any Flax model on many devices.")
    parser.add_argument("--version", action="version", version=f"axon_dist {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    words: dict[str, list[str]] = {}
    for verb in VERBS:
        sub = verbs.add_parser(
            verb.name,
            help=verb.help,
            description=verb.help,
            epilog="examples:\n" + "\n".join(f"  {line}" for line in verb.examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.add_arguments(sub)
        sub.set_defaults(run=verb.run)
        if verb is completion.VERB:
            sub.set_defaults(words=words)
        words[verb.name] = completion.words_of(sub) if is_completed else []
    return parser
