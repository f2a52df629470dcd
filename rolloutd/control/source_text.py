"""The text of a plan's playbooks, and the files of its source that differ from another source.

It reads stored trees only, follows no link out of them, and blocks: call it in a thread.
"""

from __future__ import annotations

import difflib
import filecmp
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from rolloutd.control import wire_plans

MAX_TEXT_CHARS = 200_000
"""Characters of one playbook or difference, and of all differences together: voters read no more."""

MAX_FILES = 2_000
"""Files that are compared; a larger source is a whole repository."""

VAULT_HEADER = "$ANSIBLE_VAULT;"


def playbook_texts(tree: Path, paths: Iterable[str]) -> list[wire_plans.PlaybookText]:
    """Return the text of each playbook."""
    found: list[wire_plans.PlaybookText] = []
    for path in dict.fromkeys(paths):
        text = _read_text(tree, path)
        note = None if text is not None else "not shown: encrypted, too long or not text"
        found.append({"path": path, "text": text, "note": note})
    return found


def file_differences(before: Path, after: Path) -> list[wire_plans.FileDifference]:
    """Return the files that differ, by path."""
    if before == after:
        return []
    old, new = _list_files(before), _list_files(after)
    found: list[wire_plans.FileDifference] = []
    left = MAX_TEXT_CHARS
    for path in sorted(old | new):
        if path in old and path in new and filecmp.cmp(before / path, after / path, shallow=False):
            continue
        change: Literal["added", "removed", "changed"] = (
            "added" if path not in old else "removed" if path not in new else "changed"
        )
        diff = _unified_diff(before, after, path) if left > 0 else None
        left -= len(diff or "")
        found.append({"path": path, "change": change, "diff": diff})
    return found


def _list_files(tree: Path) -> set[str]:
    files = (path for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(tree)) for path, _ in zip(files, range(MAX_FILES), strict=False)}


def _unified_diff(before: Path, after: Path, path: str) -> str | None:
    """Return the difference of one file; None if one of the two exists and is not text."""
    old, new = (_read_text(tree, path) if (tree / path).exists() else "" for tree in (before, after))
    if old is None or new is None:
        return None
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=2, lineterm=""))[2:]
    return "\n".join(lines)[:MAX_TEXT_CHARS]


def _read_text(tree: Path, path: str) -> str | None:
    real = (tree / path).resolve()
    if not real.is_relative_to(tree.resolve()) or not real.is_file():
        return None
    with real.open("rb") as file:
        content = file.read(MAX_TEXT_CHARS + 1)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    return None if len(content) > MAX_TEXT_CHARS or text.startswith(VAULT_HEADER) else text
