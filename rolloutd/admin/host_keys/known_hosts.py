"""Changes to a known_hosts file: new lines, and lines of keys that were replaced on request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import asyncssh

from rolloutd.admin.host_keys.evidence import HostKey
from rolloutd.errors import RolloutdError


class SharedLine(RolloutdError):
    """A line names other hosts too, so it cannot be removed for one of them."""


@dataclass(frozen=True, slots=True)
class KeyChange:
    node: str
    known_hosts_name: str
    stored: tuple[HostKey, ...]
    replaced: tuple[HostKey, ...]
    confirmed_by: tuple[str, ...]


def apply(text: str, changes: Sequence[KeyChange]) -> str:
    """Return the file's text with the changes; all other lines stay as they are.  Raises SharedLine."""
    lines = text.splitlines()
    for change in changes:
        if change.replaced:
            lines = list(_without(lines, change))
    lines += [
        f"{change.known_hosts_name} {key.algorithm} {key.blob}" for change in changes for key in change.stored
    ]
    return "".join(f"{line}\n" for line in lines)


def _without(lines: Sequence[str], change: KeyChange) -> Iterable[str]:
    blobs = {key.blob for key in change.replaced}
    name, port = change.known_hosts_name, None
    if name.startswith("["):
        name, _, text = name[1:].partition("]:")
        port = int(text)
    for number, line in enumerate(lines, 1):
        words = line.split()
        # Only lines with the very key are parsed: parsing each line of a large file takes seconds.
        is_candidate = len(words) > 2 and not words[0].startswith(("#", "@")) and words[2] in blobs
        if not is_candidate or not _names(line, name, port):
            yield line
        elif "," in words[0] or "*" in words[0]:
            raise SharedLine(
                f"known_hosts line {number}: it names other hosts than {change.node} too; edit it"
            )


def _names(line: str, name: str, port: int | None) -> bool:
    try:
        return bool(asyncssh.import_known_hosts(line).match(name, "", port)[0])
    except ValueError:
        return False
