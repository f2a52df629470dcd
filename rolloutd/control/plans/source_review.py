"""The files of a pinned source that a rollout runs: texts, differences, what is not shown.

It reads stored trees only, and follows no link out of them.
"""

from __future__ import annotations

import difflib
import filecmp
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rolloutd.control.plans import wire_plans
from rolloutd.files.source_archive import REQUIREMENTS_FILES
from rolloutd.planfile.playbooks import playbook_files
from rolloutd.texts.formats import pluralize

MAX_TEXT_CHARS = 200_000
"""Characters of one file or difference, and of all differences together: voters read no more."""

MAX_REVIEW_CHARS = 2_000_000
"""Characters of all texts of a review: an answer of some megabytes."""

VAULT_HEADER = "$ANSIBLE_VAULT;"


@dataclass(slots=True)
class SourceReview:
    """What a voter sees of a source; `unseen` has a line for each file that runs, is new, and is not shown.

    A file is not new if the previous rollout ran the same bytes: its voters have approved them.
    """

    playbooks: list[wire_plans.PlaybookText] = field(default_factory=list)
    files: list[wire_plans.PlaybookText] = field(default_factory=list)
    differences: list[wire_plans.FileDifference] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)


def read_source_review(
    tree: Path,
    playbooks: Mapping[str, bool],
    previous: Path | None,
    approved: Mapping[str, bool],
    new_requirements: str = "",
) -> SourceReview:
    """Return the texts of playbooks and of all that they import, and the differences to the previous tree.

    `playbooks` and `approved`, those of the previous rollout: whether each runs on localhost.
    `new_requirements` is the sha256 of what is installed for the tree, if it is not that of before.
    """
    review = SourceReview(differences=file_differences(previous, tree) if previous is not None else [])
    changed = {each["path"]: each for each in review.differences}
    required = {path for path in REQUIREMENTS_FILES if (tree / path).is_file()}
    files = (playbook_files(tree, playbooks) | required).difference(playbooks)
    # New bytes first: if the texts are too many, the others were approved before.
    # Voters have not approved a file of the previous tree that no playbook ran.
    ran = set() if previous is None else playbook_files(previous, approved) | {*approved, *REQUIREMENTS_FILES}
    is_old = {path: path in ran and _has_same_bytes(previous, tree, path) for path in (*playbooks, *files)}
    if new_requirements:
        is_old |= dict.fromkeys(required, False)
    left = MAX_REVIEW_CHARS
    for path in (*playbooks, *sorted(files, key=lambda each: (is_old[each], each))):
        shown = _shown_text(tree, path, left, is_old=is_old[path])
        left -= len(shown["text"] or "")
        (review.playbooks if path in playbooks else review.files).append(shown)
        # By the file itself: a link's difference is its target, not the bytes behind it.
        difference = changed.get(_real_path(tree, path).as_posix())
        has_diff = difference is not None and difference["diff"] is not None
        if shown["text"] is None and not is_old[path] and not has_diff and os.path.lexists(tree / path):
            review.unseen.append(f"{path}: {shown['note']}")
    installed = f"; sha256 {new_requirements}" if new_requirements else ""
    changed_requirements = sorted(path for path in required if not is_old[path])
    review.unseen += (
        f"{path}: ansible-galaxy installs what it names{installed}" for path in changed_requirements
    )
    return review


def _has_same_bytes(previous: Path | None, tree: Path, path: str) -> bool:
    """Return whether the path leads to the same bytes in both trees, over links too."""
    if previous is None:
        return False
    before, after = ((each / _real_path(each, path)) for each in (previous, tree))
    return before.is_file() and after.is_file() and filecmp.cmp(before, after, shallow=False)


def _real_path(tree: Path, path: str) -> Path:
    """Return where a path of a tree leads, relative to the tree; an absolute path outside of it."""
    real, root = Path(os.path.realpath(tree / path)), tree.resolve()
    return real.relative_to(root) if real.is_relative_to(root) else real


def _shown_text(tree: Path, path: str, left: int, *, is_old: bool) -> wire_plans.PlaybookText:
    text, problem = _read_text(tree, path)
    if "{{" in path:
        problem = "its name depends on the node, so all files of the source are below"
    if text is not None and len(text) > left:
        text, problem = None, f"the texts of the review have more than {MAX_REVIEW_CHARS:,} characters"
    if text is not None:
        return {"path": path, "text": text, "note": None}
    old = "; the same as in the previous rollout" if is_old else ""
    return {"path": path, "text": None, "note": f"not shown: {problem}{old}"}


def file_differences(before: Path, after: Path) -> list[wire_plans.FileDifference]:
    if before == after:
        return []
    old, new = _list_files(before), _list_files(after)
    found: list[wire_plans.FileDifference] = []
    left = MAX_TEXT_CHARS
    for path in sorted(old | new):
        if path in old and path in new and _is_same(before / path, after / path):
            continue
        change: Literal["added", "removed", "changed"] = (
            "added" if path not in old else "removed" if path not in new else "changed"
        )
        diff = _unified_diff(before, after, path)
        if diff is not None and len(diff) > left:
            diff = None
        left -= len(diff or "")
        found.append({"path": path, "change": change, "diff": diff})
    return found


def _list_files(tree: Path) -> set[str]:
    """Return all files and links of a tree; its size was limited when it was stored."""

    def walk() -> Iterator[Path]:
        for parent, directories, names in os.walk(tree):
            links = [name for name in directories if Path(parent, name).is_symlink()]
            yield from (Path(parent, name) for name in (*names, *links))

    return {path.relative_to(tree).as_posix() for path in walk()}


def _is_same(before: Path, after: Path) -> bool:
    if before.is_symlink() or after.is_symlink():
        return before.is_symlink() and after.is_symlink() and before.readlink() == after.readlink()
    is_program = [bool(path.stat().st_mode & 0o100) for path in (before, after)]
    return is_program[0] == is_program[1] and filecmp.cmp(before, after, shallow=False)


def _unified_diff(before: Path, after: Path, path: str) -> str | None:
    """Return the difference of one file; None if one of the two exists and is not shown as text."""
    old, new = (_diff_text(tree, path) if os.path.lexists(tree / path) else "" for tree in (before, after))
    if old is None or new is None:
        return None
    # Without the two lines of the header: the reader has the path already.
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=2, lineterm=""))[2:]
    return "\n".join(lines) or "the mode or the line ends differ"


def _diff_text(tree: Path, path: str) -> str | None:
    link = tree / path
    return f"link to {link.readlink()}\n" if link.is_symlink() else _read_text(tree, path)[0]


def _read_text(tree: Path, path: str) -> tuple[str | None, str]:
    """Return a file's text, or None and why it is not shown."""
    # Resolved: a git tree that an older version has stored may have a link that leads out of it.
    real = tree / _real_path(tree, path)
    if not real.is_relative_to(tree):
        return None, "it is outside of the source"
    if not real.is_file():
        return None, "no such file in the source"
    content = real.read_bytes()
    described = f"{pluralize(len(content), 'byte')}, sha256 {hashlib.sha256(content).hexdigest()}"
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None, f"not text ({described})"
    if "\0" in text:
        return None, f"not text ({described})"
    if text.startswith(VAULT_HEADER):
        return None, f"encrypted ({described})"
    if len(text) > MAX_TEXT_CHARS:
        return None, f"longer than {MAX_TEXT_CHARS:,} characters ({described})"
    return text, ""
