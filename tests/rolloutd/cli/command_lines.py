"""Every command of the command line: its words, its parser and an example of each argument."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from rolloutd.cli.main import parser


def leaf_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, by its words; a command with verbs has its own."""
    return dict(_walk("", parser()))


def _walk(words: str, top: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    groups = [each for each in top._actions if isinstance(each, argparse._SubParsersAction)]
    if not groups or getattr(top, "verbs", None) is not None:
        yield words.strip(), top
    for group in groups:
        for name, below in group.choices.items():
            yield from _walk(f"{words} {name}", below)
