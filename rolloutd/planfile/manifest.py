"""Manifest of artifacts (`artifacts.yml`): what a build or a CI made, with size and digest of each.

It does not open the artifacts: rolloutd/files/artifact_files.py does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from rolloutd.errors import Diagnostic
from rolloutd.planfile.document import JSON, Value, locate, read_document
from rolloutd.planfile.schema import schema_of_model
from rolloutd.planfile.validation import validate_document
from rolloutd.plugin import ABSENT, Params, SelectorText, field_types
from rolloutd.plugin.field_types import InvalidValue, raise_invalid

TITLE = "rolloutd artifact manifest"

MAX_MANIFEST_BYTES = 4 * 1024 * 1024
"""Bytes of a manifest: a thousand artifacts with long paths."""

MAX_ARTIFACTS = 1000
"""Artifacts of a manifest: more than a reviewer reads, less than a plan may store."""

MAX_ARTIFACT_BYTES = 1 << 40
"""A TiB: more than a root file system, and a limit to a mistyped size."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MODE = re.compile(r"0?[0-7]{3,4}")
_OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+~:-]{0,127}")

_UNPACKED_KINDS = ("archive", "git", "venv", "rootfs")
_TEXT_KEYS = ("path", "url", "mode", "owner")


def _form(pattern: re.Pattern[str], allowed: str) -> AfterValidator:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise InvalidValue("the value has the wrong form", allowed)
        return text

    return AfterValidator(check)


def _require_inner_path(text: str) -> str:
    if not text.isprintable() or text.startswith("-") or not {"", ".", ".."}.isdisjoint(text.split("/")):
        raise InvalidValue("this path leaves the manifest's directory", "a path such as files/app.tar.gz")
    return text


class Artifact(Params):
    """One artifact."""

    name: Annotated[str, _form(_NAME, "letters, digits, '.', '_', '+' and '-', at most 128")] = Field(
        description="Name; the same for each arch."
    )
    version: Annotated[str, _form(_VERSION, 'a version in quotes, such as "1.2.3"')] = Field(
        description="Version, for people and for playbooks."
    )
    kind: Literal["file", "archive", "package", "git", "venv", "rootfs"] = Field(
        default="file", description="What it is; `git` is a bundle, the others are files."
    )
    path: Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_require_inner_path)] = Field(
        default=ABSENT, description="File, relative to the manifest."
    )
    url: field_types.HttpUrl = Field(default=ABSENT, description="Where nodes fetch it with `method: url`.")
    sha256: Annotated[str, _form(_SHA256, "64 small hexadecimal digits, as sha256sum prints them")] = Field(
        description="SHA-256 of the file."
    )
    size: int = Field(ge=0, le=MAX_ARTIFACT_BYTES, description="Bytes of the file.")
    select: SelectorText = Field(
        default=ABSENT, description="Label selector of the nodes that get it; all if not given."
    )
    mode: Annotated[str, _form(_MODE, 'an octal mode in quotes, such as "0644"')] = Field(
        default=ABSENT, description="Mode of the file on the node; 0644 if not given."
    )
    owner: Annotated[str, _form(_OWNER, "a user, or user:group")] = Field(
        default=ABSENT, description="Owner of the file and of what is unpacked; root if not given."
    )
    unpack: bool = Field(
        default=False, description="Unpack it into the directory `unpacked` next to the file."
    )

    @model_validator(mode="after")
    def _require_place(self) -> Self:
        if {"path", "url"}.isdisjoint(self.model_fields_set):
            message = "nothing says where the artifact is"
            raise InvalidValue(message, "`path`, `url` or both", found="neither")
        if self.unpack and self.kind not in _UNPACKED_KINDS:
            allowed = f"kind {', '.join(_UNPACKED_KINDS)}"
            message = "this kind is not unpacked"
            raise InvalidValue(message, allowed, at=("unpack",), found=f"kind {self.kind}")
        return self


class Manifest(Params):
    """All artifacts of one build."""

    artifacts: list[Artifact] = Field(
        min_length=1, max_length=MAX_ARTIFACTS, description="The artifacts; a node gets those that match it."
    )

    @field_validator("artifacts")
    @classmethod
    def _require_own_nodes(cls, artifacts: list[Artifact]) -> list[Artifact]:
        """One name may occur for several archs, each with a selector of its own."""
        seen: set[tuple[str, str]] = set()
        errors = []
        for index, each in enumerate(artifacts):
            if (each.name, each.select) in seen:
                message = "two artifacts have this name and the same nodes"
                allowed = "one artifact of a name for each selector"
                errors.append(InvalidValue(message, allowed, at=(index, "name")))
            seen.add((each.name, each.select))
        raise_invalid(errors)
        return artifacts


@dataclass(frozen=True, slots=True)
class LocatedManifest:
    records: list[dict[str, JSON]]
    root: Value

    def diagnostic(self, number: int, key: str, found: str, allowed: str, message: str) -> Diagnostic:
        path, value, parent = locate(self.root, ("artifacts", number, key))
        return (value or parent).location.diagnostic(path, found, allowed, message)


def locate_manifest(text: bytes, file: str) -> LocatedManifest:
    """Return the artifacts with their places; raises InvalidFile with every mistake."""
    document = read_document(text, file)
    records = _records(validate_document(Manifest, document, TITLE))
    assert document.root is not None  # validate_document() raises where there is no document
    return LocatedManifest(records, document.root)


def read_manifest(text: bytes, file: str) -> list[dict[str, JSON]]:
    """Return the artifacts as records with all keys; raises InvalidFile with every mistake."""
    return locate_manifest(text, file).records


def _records(manifest: Manifest) -> list[dict[str, JSON]]:
    records = [artifact.model_dump(mode="json") for artifact in manifest.artifacts]
    for record in records:
        record.update({key: record[key] or "" for key in _TEXT_KEYS}, select=record["select"] or None)
    return records


def schema() -> dict[str, JSON]:
    return schema_of_model(Manifest, TITLE)


def format_manifest(records: Iterable[Mapping[str, JSON]]) -> str:
    """Return the text of a manifest: one line for each artifact, without the defaults."""
    lines = ["artifacts:"]
    for record in records:
        written = {
            key: record[key]
            for key, field in Artifact.model_fields.items()
            if record.get(key) not in (None, "", field.default)
        }
        # JSON's quotes, so that no reader takes a version or a digest for a number.
        pairs = (f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in written.items())
        lines.append(f"  - {{{', '.join(pairs)}}}")
    return "\n".join(lines) + "\n"
