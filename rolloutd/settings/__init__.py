"""The daemon's settings: `config.yaml`, then the files in `config.d`.

Maps merge, lists and single values replace, later files win.  All mistakes of all files are reported at once,
each with its file and line.  Relative paths start at the directory of their file.  It does not check whether
a path exists or a user is known.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rolloutd.errors import Diagnostic, InvalidFile
from rolloutd.planfile import rules
from rolloutd.planfile.diagnostic_text import ROOT_PATH
from rolloutd.planfile.document import MAX_BYTES, Document, Value, read_document
from rolloutd.planfile.schema import schema_of_model, values_of_format
from rolloutd.planfile.validation import FileFormat, RuleViolation, validate_document
from rolloutd.plugin import CHECKS, INVENTORIES, OBSERVERS, installed_adapters
from rolloutd.settings.model import PoolKey, Settings, TeamSettings

__all__ = ["DEFAULT_CONFIG", "MAX_FILES", "PoolKey", "Settings", "TeamSettings", "load", "schema"]

JSON = Any

DEFAULT_CONFIG = Path("/etc/rolloutd/config.yaml")

MAX_FILES = 100
"""Files of config.d: one per team and a few more; a larger number is the mistake of a generator."""

TITLE = "rolloutd settings"

MAX_PATH_BYTES, MAX_NAME_BYTES = 4095, 255
"""Bytes of a path and of one name in it (PATH_MAX and NAME_MAX of Linux)."""


def load(path: Path | None) -> Settings:
    """Read the settings file and the files in its `config.d`; None means all defaults.

    Raises InvalidFile with every mistake of every file, also if a file cannot be read or all files are empty.
    """
    if path is None:
        return Settings()
    config_dir = path.parent / "config.d"
    files = [path, *sorted(file for file in config_dir.glob("*.yaml") if not file.name.startswith("."))]
    documents = [_read_file(file) for file in files[:MAX_FILES]]
    diagnostics = [mistake for document in documents for mistake in document.diagnostics]
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
        # A full disk can truncate the file; defaults would then remove teams, pools and inventory.
        raise InvalidFile((_file_diagnostic(path, "nothing", "at least one key, here or in config.d"),))
    _resolve_paths(root)
    settings = validate_document(Settings, Document(str(path), root, tuple(diagnostics)), FORMAT)
    settings._files = tuple(files)
    return settings


def schema() -> dict[str, Any]:
    return schema_of_model(Settings, TITLE)


def _read_file(path: Path) -> Document:
    try:
        with path.open("rb") as opened:
            text = opened.read(MAX_BYTES + 1)
    except OSError as error:
        diagnostic = _file_diagnostic(path, error.strerror or str(error), "a file the daemon can read")
        return Document(str(path), None, (diagnostic,))
    document = read_document(text, str(path), empty_is_mapping=True)
    if document.root is not None and not isinstance(document.root.children, dict):
        diagnostic = document.root.location.diagnostic(
            ROOT_PATH, "not a mapping", "a mapping (key: value)", "settings are a mapping"
        )
        return Document(str(path), None, (*document.diagnostics, diagnostic))
    return document


def _file_diagnostic(path: Path, found: str, allowed: str) -> Diagnostic:
    return Diagnostic(str(path), 1, 1, ROOT_PATH, found, allowed, "the settings cannot be read")


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
            with contextlib.suppress(RuntimeError):  # no such user: `_paths_are_usable` reports it
                value.data = parent.data[path[-1]] = str(directory / Path(text).expanduser())


def _paths_are_usable(root: Value) -> Iterator[RuleViolation]:
    """A path names a known home directory and is one that Linux can have."""
    for path, value, _ in values_of_format(schema(), root, "path"):
        text = value.data
        if not isinstance(text, str):
            continue
        if text.startswith("~"):
            yield RuleViolation(path, text[:100], "a path", "this machine has no home directory of that user")
        elif "\0" in text or len(os.fsencode(text)) > MAX_PATH_BYTES or _longest_name(text) > MAX_NAME_BYTES:
            yield RuleViolation(path, f"{text[:100]}...", "a path that Linux allows", "the path is too long")


def _longest_name(path: str) -> int:
    return max(len(os.fsencode(name)) for name in path.split("/"))


def _check_teams(root: Value) -> Iterator[RuleViolation]:
    teams = root.child("teams")
    if teams is None or not isinstance(teams.children, dict):
        return
    for name in teams.children:
        yield from rules.steps_are_well_formed(root, ("teams", name, "verify"), CHECKS)
        yield from rules.windows_are_not_empty(root, ("teams", name, "windows"))


def _source_names_are_unique(root: Value) -> Iterator[RuleViolation]:
    """Two sources of one kind have different names: a node finds its source by it."""
    taken: set[tuple[str, str]] = set()
    for number, source in enumerate(rules.as_list(root.child("inventory"))):
        for kind, params in source.children.items() if isinstance(source.children, dict) else ():
            given = params.child("name")
            name = _default_source_name(kind) if given is None else given.data
            if not isinstance(name, str):
                continue
            if (kind, name) in taken:
                path = ("inventory", number, kind, *(() if given is None else ("name",)))
                yield RuleViolation(path, name, "a unique name", f"another {kind} source has this name")
            taken.add((kind, name))


def _default_source_name(kind: str) -> JSON:
    """Return the name of a source whose settings give none; None if its kind has no names."""
    registration = installed_adapters(INVENTORIES).get(kind)
    fields = registration.params.model_fields if registration and registration.params else {}
    return fields["name"].get_default() if "name" in fields else None


FORMAT = FileFormat(
    title=TITLE,
    rules=(
        lambda root: rules.steps_are_well_formed(root, ("inventory",), INVENTORIES),
        lambda root: rules.steps_are_well_formed(root, ("observe",), OBSERVERS),
        _paths_are_usable,
        _source_names_are_unique,
        _check_teams,
    ),
)
