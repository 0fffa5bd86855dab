"""`axon VERB ...`: parses the arguments, runs the verb, says mistakes in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from axon_dist import __version__
from axon_dist.core.errors import AxonDistError, ConfigError, did_you_mean
from axon_dist.launch import leave

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
    launch.VERB,
    schedule.VERB,
    verify.VERB,
    doctor.VERB,
    completion.VERB,
)
"""Every verb, in the order of `axon --help`."""

_USER_ERROR = 2
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, like every other mistake of a user."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with the message."""
        self.exit(_USER_ERROR, f"axon: error: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: what follows `axon`; None takes those of the process.

    Returns:
        The exit code: 0, 2 for a mistake of the user, 130 when interrupted for good, or whatever
        the verb returns.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _check_verb(arguments)
        parsed = _parse(arguments)
        return parsed.run(parsed)
    except AxonDistError as error:
        print(f"axon: error: {error}", file=sys.stderr)
        return leave(_USER_ERROR, str(error))
    except KeyboardInterrupt:
        print("axon: interrupted", file=sys.stderr)
        return leave(_INTERRUPTED, "interrupted")


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
