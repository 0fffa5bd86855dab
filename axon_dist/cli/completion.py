"""`axon completion bash|zsh`: a script by which a shell completes verbs, options and keys."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from axon_dist.config import describe

from .verb import Verb

_SCRIPT = """\
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the shell."""
    parser.add_argument("shell", choices=["bash", "zsh"], help="whose script to print")


def script(options: Mapping[str, Sequence[str]], shell: str) -> str:
    """The script.

    Args:
        options: of each verb the words that may follow it.
        shell: `bash` or `zsh`.
    """
    cases = [f'    {verb}) words="{" ".join(words)}" ;;' for verb, words in options.items()]
    text = _SCRIPT.format(verbs=" ".join(options), cases="\n".join(cases))
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if shell == "zsh" else text


def words_of(parser: argparse.ArgumentParser) -> list[str]:
    """What can follow a verb: options, choices, and where it takes overrides the keys of a config.

    Args:
        parser: of the verb.
    """
    words = []
    for action in parser._actions:
        words += action.option_strings
        if not action.option_strings and action.choices:
            words += action.choices
        if action.dest == "overrides":
            words += [f"{key}=" for key in keys()]
        if action.dest == "section":
            words += dict.fromkeys(row.path for row in describe() if row.path)
    return words


def keys() -> list[str]:
    """Every key of a config, once."""
    return list(dict.fromkeys(key.path for row in describe() for key in row.keys))


def run(arguments: argparse.Namespace) -> int:
    """Prints the script."""
    sys.stdout.write(script(arguments.words, arguments.shell))
    return 0


VERB = Verb(
    "completion",
    "Print a script by which a shell completes this command.",
    add_arguments,
    run,
    examples=(
        'eval "$(axon completion bash)"',
        "axon completion zsh > ~/.axon-completion.zsh",
    ),
)
