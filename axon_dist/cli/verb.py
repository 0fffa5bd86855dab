"""`Verb`: a word after `axon`, the arguments it takes, and what it does."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Verb:
    """One row of the table of verbs.

    Args:
        name: the word.
        help: a sentence for `axon --help`.
        add_arguments: declares the arguments.
        run: does it; returns the exit code.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
