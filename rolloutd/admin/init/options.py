"""Options of `rolloutctl init`, and the questions that it asks at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rolloutd.admin.program import ProgramOptions, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(ProgramOptions):
    inventory: Sequence[str] = ()
    kubeconfig: Sequence[str] = ()
    haproxy: Sequence[str] = ()
    netbox: str | None = None
    netbox_token_file: str | None = None
    ssh_user: str | None = None
    ssh_key: str | None = None
    known_hosts: str | None = None
    label: Sequence[str] = ()
    pool: Sequence[str] = ()
    team: Sequence[str] = ()
    observe_only: Literal["on", "off"] | None = None
    state_dir: str | None = None
    socket: str | None = None
    nodes_playbook: str | None = None
    no_search: bool = False
    dry_run: bool = False


def split_option(option: str, text: str) -> tuple[str, str]:
    """Return the two sides of NAME=VALUE; raises UsageError."""
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise UsageError(f"{option}: {text!r} is not NAME=VALUE; write it so")
    return name, value


def absolute(text: str) -> str:
    """Return a path of the command line as the settings need it, wherever they are."""
    return str(Path(text).expanduser().absolute())


class Dialog:
    """Questions to the user; without a terminal or with --yes the proposals are the answers."""

    def __init__(self, options: Options) -> None:
        is_terminal = sys.stdin.isatty() and sys.stderr.isatty()
        if not is_terminal and not options.yes and not options.dry_run:
            raise UsageError("rolloutctl init: no terminal to ask at; add --yes to take what it proposes")
        self._asks = is_terminal and not options.yes

    @property
    def asks(self) -> bool:
        return self._asks

    def confirm(self, question: str, *, proposed: bool) -> bool:
        if not self._asks:
            return proposed
        answer = self._read(f"{question} [{'Y/n' if proposed else 'y/N'}] ").lower()
        return proposed if not answer else answer in ("y", "yes")

    def text(self, question: str, proposed: str) -> str:
        if not self._asks:
            return proposed
        return self._read(f"{question} [{proposed}]: ") or proposed

    def words(self, question: str, proposed: Sequence[str]) -> list[str]:
        """Ask for a list, separated by commas; `-` is an empty one."""
        answer = self.text(question, ", ".join(proposed) or "-")
        return [] if answer == "-" else [word.strip() for word in answer.split(",") if word.strip()]

    def _read(self, prompt: str) -> str:
        sys.stderr.write(prompt)
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:  # Ctrl-D at the prompt
            raise UsageError("rolloutctl init: no answer; nothing was written")
        return line.strip()
