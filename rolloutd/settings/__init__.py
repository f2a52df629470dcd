"""The daemon's settings: `config.yaml`, then the files in `config.d`.

Maps merge, lists and single values replace, later files win.  All mistakes of all files are reported at once,
each with its file and line.  Relative paths start at the directory of their file.  It does not check whether
a path exists or a user is known.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from rolloutd.errors import Diagnostic, InvalidFile
from rolloutd.planfile.document import MAX_BYTES, Document, SourceLocation, Value, read_document
from rolloutd.planfile.schema import schema_of_model, values_of_format
from rolloutd.planfile.validation import validate_document
from rolloutd.settings.model import PoolKey, Settings, TeamSettings

__all__ = ["DEFAULT_CONFIG", "MAX_FILES", "PoolKey", "Settings", "TeamSettings", "load", "schema"]

DEFAULT_CONFIG = Path("/etc/rolloutd/config.yaml")

MAX_FILES = 100
"""Files of config.d: one per team and a few more; a larger number is the mistake of a generator."""

TITLE = "rolloutd settings"


def load(path: Path | None, content: bytes | None = None) -> Settings:
    """Read the settings file and the files in its `config.d`; None means all defaults.

    `content` is read in place of the file's own.  Raises InvalidFile with every mistake of every file, also
    if a file cannot be read or all files are empty.
    """
    if path is None:
        return Settings()
    diagnostics: list[Diagnostic] = []
    files = [path, *_list_later_files(path.parent / "config.d", diagnostics)]
    documents = [_read_file(file, content if file == path else None) for file in files[:MAX_FILES]]
    diagnostics += [mistake for document in documents for mistake in document.diagnostics]
    if len(files) > MAX_FILES:
        diagnostics.append(
            _file_diagnostic(files[MAX_FILES], f"{len(files)} files", f"at most {MAX_FILES} files")
        )
    roots = [document.root for document in documents if document.root is not None]
    if not roots:
        raise InvalidFile(tuple(diagnostics))
    root = roots[0]
    for other in roots[1:]:
        root = _merge(root, other)
    if not root.children and not diagnostics:
        raise InvalidFile((_file_diagnostic(path, "nothing", "at least one key, here or in config.d"),))
    _resolve_paths(root)
    settings = validate_document(Settings, Document(str(path), root, tuple(diagnostics)), TITLE)
    settings._files = tuple(files)
    return settings


def schema() -> dict[str, Any]:
    return schema_of_model(Settings, TITLE)


def _list_later_files(directory: Path, diagnostics: list[Diagnostic]) -> list[Path]:
    """Return the files of `config.d`, none where there is none; a mistake if it cannot be listed."""
    if not os.path.lexists(directory):
        return []
    try:
        # Not glob(): it takes a directory that cannot be read for an empty one.
        names = sorted(file.name for file in directory.iterdir())
    except OSError as error:
        diagnostics.append(
            _file_diagnostic(directory, error.strerror or str(error), "a directory the daemon can read")
        )
        return []
    return [directory / name for name in names if name.endswith(".yaml") and not name.startswith(".")]


def _read_file(path: Path, content: bytes | None) -> Document:
    try:
        if content is None:
            with path.open("rb") as opened:
                # One byte more than the limit, so that the reader reports the excess.
                content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        diagnostic = _file_diagnostic(path, error.strerror or str(error), "a file the daemon can read")
        return Document(str(path), None, (diagnostic,))
    if not content:
        # A full disk can truncate the file; defaults would then remove teams, pools and inventory.
        return Document(
            str(path), None, (_file_diagnostic(path, "nothing", "a comment, or at least one key"),)
        )
    document = read_document(content, str(path), empty_is_mapping=True)
    if document.root is not None and not isinstance(document.root.children, dict):
        diagnostic = document.root.location.diagnostic(
            (), "not a mapping", "a mapping (key: value)", "settings are a mapping"
        )
        return Document(str(path), None, (*document.diagnostics, diagnostic))
    return document


def _file_diagnostic(path: Path, found: str, allowed: str) -> Diagnostic:
    return SourceLocation(str(path), 1, 1).diagnostic((), found, allowed, "the settings cannot be read")


def _merge(base: Value, override: Value) -> Value:
    """Merge a later file into an earlier one: mappings by key, all else replaced."""
    if not isinstance(base.children, dict) or not isinstance(override.children, dict):
        return override
    children = dict(base.children)
    for key, value in override.children.items():
        children[key] = _merge(children[key], value) if key in children else value
    plain = {key: value.data for key, value in children.items()}
    return Value(plain, base.location, children, {**base.keys, **override.keys})


def _resolve_paths(root: Value) -> None:
    """Make relative paths absolute, each from the directory of its own file."""
    for path, value, parent in values_of_format(schema(), root, "path"):
        text = value.data
        is_command = path == ("ansible", "bin") and isinstance(text, str) and "/" not in text
        if isinstance(text, str) and text.strip() and not is_command:
            directory = Path(value.location.file).absolute().parent
            with contextlib.suppress(
                RuntimeError, ValueError
            ):  # no such user, or NUL: the path's type reports it
                value.data = parent.data[path[-1]] = str(directory / Path(text).expanduser())
