"""`axon VERB ...`: parses the arguments, runs the verb, reports errors in one line.

Importing this module does not import JAX, so that `axon --help` and usage errors are fast. The
module of a verb is imported when the verb runs.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from axon_dist import __version__
from axon_dist.core.clock import process_began
from axon_dist.core.errors import AxonDistError, ConfigError, did_you_mean
from axon_dist.core.heaps import limit_heaps
from axon_dist.core.words import printable

from .values import fitted
from .verbs import VERBS

_USER_ERROR = 2
_INTERRUPTED = 130
_LONGEST = 2000
"""The maximum number of characters of a message; the middle of a longer message is cut out."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like every other user error."""

    def format_help(self) -> str:
        """Returns the help; on a terminal its lines wrap between words."""
        return fitted(super().format_help(), sys.stdout)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses arguments, and keeps them for the errors of argparse."""
        self.words = list(args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Ends the program with the message.

        Argparse looks for missing arguments first. The unknown option is named in its place,
        because `--propmt hello` is then a misspelt `--prompt` and not a missing one.
        """
        unknown = self._unknown() if "arguments are required" in message else []
        if unknown:
            message = self.unrecognized(unknown)
        text = one_line(message)
        see = " See" if text.endswith("?") else "; see"
        line = f"axon: error: {text}{see} {self.prog} --help"
        self.exit(_USER_ERROR, fitted(line, sys.stderr) + "\n")

    def _options(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]

    def _unknown(self) -> list[str]:
        """Returns the words that look like options and are not, not even as abbreviations."""
        options = self._options()
        typed = [word for word in self.words if word.startswith("--") and word != "--"]
        names = [(word, word.partition("=")[0]) for word in typed]
        return [word for word, name in names if not any(o.startswith(name) for o in options)]

    def unrecognized(self, words: Sequence[str]) -> str:
        """Names unknown arguments, and suggests an option that is similar to the first one."""
        name = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
        hint = did_you_mean(name, self._options()) if name else ""
        hint = hint.partition(" Valid:")[0] if hint.startswith(" Did") else ""
        return f"unrecognized arguments: {' '.join(words)}{'.' if hint else ''}{hint}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: the arguments after `axon`; None uses those of the process.

    Returns:
        The exit code: the code that the verb returns; 2 for a user error; 130 when interrupted; or
        1 for an unexpected error, whose traceback is written to a file.
    """
    # For the command of the process, count time from the start of the process.
    began = process_began() if arguments is None else time.perf_counter()
    if arguments is None:
        _open_streams()
        limit_heaps()
        warnings.showwarning = _show_warning
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if set(os.environ.get("COLUMNS", "1")) == {"0"}:
        # Some terminals report a width of 0; with it, nothing would be printed.
        del os.environ["COLUMNS"]
    with _noting_interrupts() as interrupts:
        try:
            return _run(arguments, began)
        except BrokenPipeError:
            # The reader has closed the pipe; do not let the flush at exit fail again.
            _silence(sys.stdout)
            return 0
        except (Exception, KeyboardInterrupt) as error:
            return _leave(KeyboardInterrupt() if interrupts else _of_output(error))


def _run(arguments: Sequence[str], began: float) -> int:
    """Parses the arguments and runs the verb; returns its exit code."""
    parsed = _parse(arguments)
    _check_keys(parsed)
    parsed.began = began
    code = parsed.verb.run(parsed)
    sys.stdout.flush()
    return code


def _open_streams() -> None:
    """Opens the standard streams on the null device if they are closed, as some daemons start us.

    Python sets such a stream to None. The next file or socket would get its descriptor, and text
    for the stream would be written into that file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The system assigns the lowest free descriptor; all lower ones are open by now.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Do not open the descriptor itself: it may belong to a file opened since the start.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


@contextlib.contextmanager
def _noting_interrupts() -> Iterator[list[int]]:
    """Yields a list to which each SIGINT that raises `KeyboardInterrupt` is added.

    C modules, such as those of NumPy and jaxlib, raise an `ImportError` instead if the interrupt
    occurs while they are imported.
    """
    interrupts: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupts
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _of_output(error: BaseException) -> BaseException:
    """Returns the error to report: one that names the standard output if that failed."""
    if not isinstance(error, OSError) or error.errno not in _FULL or error.filename is not None:
        return error
    try:
        # The error does not name its file, so test whether another line fails, too.
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as again:
        # The flush at exit would fail again.
        _silence(sys.stdout)
        if again.errno not in _FULL:
            return error
        return ConfigError(
            f"the standard output cannot be written: {error.strerror}; make room on its disk, or "
            "send it elsewhere",
            code="output-not-written",
        )
    return error


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _leave(error: BaseException) -> int:
    """Reports an error; returns the exit code if this process is the only one."""
    # Do not import it here: the error may have ended an import of JAX, and a second import fails
    # with another error, or aborts the process. A process that has not imported it has no peers.
    launch = sys.modules.get("axon_dist.launch")
    # A module that is still being imported lacks its last names.
    leave = getattr(launch, "leave", _leave_alone)
    leave_after = getattr(launch, "leave_after", lambda _: 1)
    if isinstance(error, AxonDistError):
        _say(f"error: {one_line(error)}")
        return leave(_USER_ERROR, one_line(error))
    if isinstance(error, KeyboardInterrupt):
        _say("interrupted")
        return leave(_INTERRUPTED, "interrupted")
    # Keep only our notes; JAX adds notes about its own frames.
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
    return leave_after(error)


def _leave_alone(code: int, _: str) -> int:
    return code


_OF_OTHERS = {"axon_dist", "jax", "flax", "optax", "numpy", *sys.stdlib_module_names}


def _is_users(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in _OF_OTHERS


def one_line(message: object) -> str:
    """Formats a message as one line, and cuts a very long one.

    Example:
        >>> one_line("no such\\n    file")
        'no such file'
    """
    # Arguments may contain lone surrogates, which cannot be encoded.
    text = " ".join(str(message).split()).encode(errors="backslashreplace").decode()
    text = printable(text)
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} ... {text[-half:]}"


def _say(text: str) -> None:
    """Writes to standard error, if that is possible."""
    with contextlib.suppress(OSError):
        print(fitted(f"axon: {text}", sys.stderr), file=sys.stderr, flush=True)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Shows a warning; omits file and line if they refer to the script of the command."""
    if file is None and os.path.abspath(filename) == os.path.abspath(sys.argv[0]):
        _say(f"warning: {one_line(message)}")
    else:
        stream = sys.stderr if file is None else file
        with contextlib.suppress(OSError):
            stream.write(warnings.formatwarning(message, category, filename, lineno, line))


def _silence(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _save_traceback(error: BaseException) -> str:
    """Writes a traceback into a file, and returns a clause with its path."""
    if isinstance(error, OSError):
        # If standard output is on a full disk, the flush at exit would fail again.
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
    """Parses the arguments; accepts overrides after options, which argparse does not.

    Raises:
        ConfigError: when the first argument is not a verb.
    """
    names = [verb.name for verb in VERBS]
    if not arguments:
        raise ConfigError(f"got no verb.{did_you_mean('', names)} See axon --help")
    if not arguments[0].startswith("-") and arguments[0] not in names:
        raise ConfigError(f"there is no verb {arguments[0]!r}.{did_you_mean(arguments[0], names)}")
    parser, by_name = _parser(arguments[0])
    parsed, extra = parser.parse_known_args(arguments)
    if extra and (not hasattr(parsed, "overrides") or any(a.startswith("-") for a in extra)):
        by_name[parsed.verb.name].error(by_name[parsed.verb.name].unrecognized(extra))
    if extra:
        parsed.overrides = [*parsed.overrides, *extra]
    return parsed


def _parser(
    called: str | None = None,
) -> tuple[_Parser, dict[str, _Parser]]:
    """Builds the parser of the command, and those of its verbs by name.

    Args:
        called: the only verb whose arguments are declared; if it is not a verb, those of all are.
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
            epilog="\n".join(["examples:", *map(_example, verb.examples)]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if not is_verb or verb.name == called:
            verb.add_to(by_name[verb.name])
    return parser, by_name


def _example(line: str) -> str:
    # Indent continuation lines, so that they do not look like another example.
    return fitted(f"  {line}", sys.stdout, indent=6)


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

They are stored in a file, because every new shell runs `axon completion`, and reading the keys from
the code takes seconds.
"""

RENAMED_KEYS = frozenset({"train.layer_norms"})
"""Deprecated keys, which sections still accept (`renamed_fields`)."""


def _check_keys(arguments: argparse.Namespace) -> None:
    """Raises for an unreadable config and misspelt keys before the imports, which take seconds.

    `axon_dist.train.config` makes all other checks.
    """
    if not (getattr(arguments, "config", None) and hasattr(arguments, "overrides")):
        return
    # Import this here: it needs ruamel.yaml, which `axon --help` does not.
    plain = importlib.import_module("axon_dist.core.plain_yaml")
    data = plain.read_yaml(arguments.config)
    for override in arguments.overrides:
        data = plain.apply_override(data, override)
    keys = {word[:-1] for word in CONFIG_KEYS.read_text().split() if word.endswith("=")}
    sections = [("", data)]
    while sections:
        path, section = sections.pop()
        _check_blanks(section)
        names = {key.removeprefix(path) for key in keys if key.startswith(path)}
        names = {name for name in names if "." not in name}
        if not names or "factory" in names or path == "parallel.":
            # Skip sections whose keys the user chooses, or whose keys depend on their kind, and
            # strategies, which have several names.
            continue
        for key, value in section.items():
            is_known = key in names or any(other.endswith(f".{key}") for other in keys)
            is_known = is_known or f"{path}{key}" in RENAMED_KEYS
            if not is_known and (hint := did_you_mean(key, names)).startswith(" Did"):
                raise ConfigError(f"{path}{key}: there is no such key.{hint}")
            if isinstance(value, Mapping):
                sections.append((f"{path}{key}.", value))


def _check_blanks(section: Mapping[str, object]) -> None:
    """Raises for a key such as `name:adamw`, which YAML reads if the space is missing."""
    for key, value in section.items():
        if value is None and ":" in key:
            name, _, text = key.partition(":")
            raise ConfigError(
                f"got the key {key!r:.80} without a value; YAML needs a space after the colon: "
                f"write {{{name}: {text}}}",
                code="blank-after-colon",
            )


def _words_of(parser: argparse.ArgumentParser) -> list[str]:
    """Lists the words that can follow a verb: options, choices, config sections and keys."""
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
    """Prints a script that lets a shell complete verbs, options and keys."""
    _, by_name = _parser()
    words = {name: " ".join(_words_of(parser)) for name, parser in by_name.items()}
    cases = "\n".join(f'    {verb}) words="{text}" ;;' for verb, text in words.items())
    if arguments.shell == "zsh":
        sys.stdout.write("autoload -U +X bashcompinit && bashcompinit\n")
    sys.stdout.write(_COMPLETION.format(verbs=" ".join(words), cases=cases))
    return 0
