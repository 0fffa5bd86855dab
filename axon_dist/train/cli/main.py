"""`axon VERB ...`: parses the arguments, runs the verb, reports mistakes in one line.

Importing it imports no JAX: `axon --help` and a wrong flag need none. The module of a verb is
imported when the verb runs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from axon_dist import __version__
from axon_dist.core.clock import process_began
from axon_dist.core.errors import AxonDistError, ConfigError, did_you_mean
from axon_dist.core.words import printable

from .values import fitted
from .verbs import VERBS

_USER_ERROR = 2
_INTERRUPTED = 130
_LONGEST = 2000
"""The longest message in letters; the middle of a longer one is cut."""


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, like every other mistake of a user."""

    def format_help(self) -> str:
        """The help; on a screen its lines break between words."""
        return fitted(super().format_help(), sys.stdout)

    def error(self, message: str) -> NoReturn:
        """Ends the program with the message."""
        self.exit(_USER_ERROR, f"axon: error: {one_line(message)}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: what follows `axon`; None takes those of the process.

    Returns:
        The exit code: 0, 2 for a mistake of the user, 130 when interrupted, 1 for an
        unexpected error, whose traceback goes to a file, or whatever the verb returns.
    """
    # Where this is the command of a process, all its seconds are those of the verb.
    began = process_began() if arguments is None else time.perf_counter()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if set(os.environ.get("COLUMNS", "1")) == {"0"}:
        # A terminal that does not know its width says so, and nothing would be printed at all.
        del os.environ["COLUMNS"]
    try:
        parsed = _parse(arguments)
        _check_keys(parsed)
    except ConfigError as error:
        # No verb has run, so this process cannot be one of several yet.
        _say(f"error: {one_line(error)}")
        return _USER_ERROR
    parsed.began = began
    try:
        code = parsed.verb.run(parsed)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader is gone: flushing at the interpreter's exit must not fail again.
        _silence(sys.stdout)
        return 0
    except (Exception, KeyboardInterrupt) as error:
        return _leave(error)


def _leave(error: BaseException) -> int:
    """Reports the error of a verb; returns the exit code where this process is the only one."""
    launch = importlib.import_module("axon_dist.launch")
    if isinstance(error, AxonDistError):
        _say(f"error: {one_line(error)}")
        return launch.leave(_USER_ERROR, one_line(error))
    if isinstance(error, KeyboardInterrupt):
        _say("interrupted")
        return launch.leave(_INTERRUPTED, "interrupted")
    # JAX adds notes about its own frames.
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("raised by")]
    message = ", ".join([str(error), *notes])
    frames = [(f, line) for f, line in traceback.walk_tb(error.__traceback__) if _is_users(f)]
    what = f"unexpected {type(error).__name__}"
    if notes and frames:
        frame, line = frames[-1]
        file = frame.f_code.co_filename.removeprefix(f"{os.getcwd()}/")
        whose = "loss" if notes[0].startswith("raised by loss_fn") else "code"
        what = f"your {whose} raised {type(error).__name__} at {file}:{line}"
    _say(f"{what}: {one_line(message)}; {_save_traceback(error)}")
    return launch.leave_after(error)


_OF_OTHERS = {"axon_dist", "jax", "flax", "optax", "numpy", *sys.stdlib_module_names}


def _is_users(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in _OF_OTHERS


def one_line(message: object) -> str:
    """A message for people as one line, cut where it is endless.

    Example:
        >>> one_line("no such\\n    file")
        'no such file'
    """
    # Half a letter, as an argument may hold it, cannot be written.
    text = " ".join(str(message).split()).encode(errors="backslashreplace").decode()
    text = printable(text)
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} ... {text[-half:]}"


def _say(text: str) -> None:
    """Writes to the standard error, if that can be written to."""
    with contextlib.suppress(OSError):
        print(fitted(f"axon: {text}", sys.stderr), file=sys.stderr, flush=True)


def _silence(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _save_traceback(error: BaseException) -> str:
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
    """Parses, and takes overrides behind options, too, which argparse leaves over.

    Raises:
        ConfigError: when the first argument is no verb.
    """
    names = [verb.name for verb in VERBS]
    if not arguments:
        raise ConfigError(f"got no verb.{did_you_mean('', names)} See axon --help")
    if not arguments[0].startswith("-") and arguments[0] not in names:
        raise ConfigError(f"there is no verb {arguments[0]!r}.{did_you_mean(arguments[0], names)}")
    parser, _ = _parser(arguments[0])
    parsed, behind = parser.parse_known_args(arguments)
    if behind and (not hasattr(parsed, "overrides") or any(a.startswith("-") for a in behind)):
        parser.error(f"unrecognized arguments: {' '.join(behind)}")
    if behind:
        parsed.overrides = [*parsed.overrides, *behind]
    return parsed


def _parser(
    called: str | None = None,
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of the command, and those of its verbs by name.

    Args:
        called: the verb whose arguments alone are declared; those of all where it is none.
    """
    parser = _Parser(prog="axon", description="Train any Flax model on many devices.")
    parser.add_argument("--version", action="version", version=f"axon_dist {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    by_name = {}
    is_verb = called in [verb.name for verb in VERBS]
    for verb in VERBS:
        by_name[verb.name] = verbs.add_parser(
            verb.name,
            help=verb.help,
            description=verb.help,
            epilog="examples:\n" + "\n".join(f"  {line}" for line in verb.examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if not is_verb or verb.name == called:
            verb.add_to(by_name[verb.name])
    return parser, by_name


_COMPLETION = """\
_axon() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" verb="${{COMP_WORDS[1]}}" words=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{verbs} --help --version" -- "$word"))
    return
  fi
  case "$verb" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [[ "$word" == -* ]] || COMPREPLY+=($(compgen -f -- "$word"))
  if [[ ${{#COMPREPLY[@]}} -eq 1 && "${{COMPREPLY[0]}}" == *= ]]; then
    compopt -o nospace 2>/dev/null
  fi
}}
complete -o filenames -F _axon axon
"""


CONFIG_KEYS = Path(__file__).with_name("config_keys.txt")
"""The sections and keys of a config, as `axon_dist.train.config.completion_words` lists them.

A shell runs `axon completion` whenever it starts; to read the keys from the code takes seconds.
"""


def _check_keys(arguments: argparse.Namespace) -> None:
    """Refuses a config that cannot be read, and misspelt keys of it, before seconds of imports.

    What is wrong otherwise `axon_dist.train.config` says, which knows which keys a section has.
    """
    if not (getattr(arguments, "config", None) and hasattr(arguments, "overrides")):
        return
    # It takes ruamel.yaml, which `axon --help` does without.
    plain = importlib.import_module("axon_dist.core.plain_yaml")
    data = plain.read_yaml(arguments.config)
    for override in arguments.overrides:
        data = plain.apply_override(data, override)
    keys = {word[:-1] for word in CONFIG_KEYS.read_text().split() if word.endswith("=")}
    sections = [("", data)]
    while sections:
        path, section = sections.pop()
        names = {key.removeprefix(path) for key in keys if key.startswith(path)}
        names = {name for name in names if "." not in name}
        if not names or "factory" in names or path == "parallel.":
            # Names chosen by the user, keys that depend on the kind of the section, or strategies,
            # which have several names.
            continue
        for key, value in section.items():
            is_known = key in names or any(other.endswith(f".{key}") for other in keys)
            if not is_known and (hint := did_you_mean(key, names)).startswith(" Did"):
                raise ConfigError(f"{path}{key}: there is no such key.{hint}")
            if isinstance(value, Mapping):
                sections.append((f"{path}{key}.", value))


def _words_of(parser: argparse.ArgumentParser) -> list[str]:
    """The words that can follow a verb: options, choices, and the sections or keys of a config."""
    of_config = CONFIG_KEYS.read_text().split()
    words = []
    for action in parser._actions:
        words += action.option_strings
        if not action.option_strings and action.choices:
            words += action.choices
        if action.dest == "overrides":
            words += [word for word in of_config if word.endswith("=")]
        if action.dest == "section":
            words += [word for word in of_config if not word.endswith("=")]
    return words


def print_completion(arguments: argparse.Namespace) -> int:
    """Prints a script by which a shell completes verbs, options and keys."""
    _, by_name = _parser()
    words = {name: " ".join(_words_of(parser)) for name, parser in by_name.items()}
    cases = "\n".join(f'    {verb}) words="{text}" ;;' for verb, text in words.items())
    if arguments.shell == "zsh":
        sys.stdout.write("autoload -U +X bashcompinit && bashcompinit\n")
    sys.stdout.write(_COMPLETION.format(verbs=" ".join(words), cases=cases))
    return 0
