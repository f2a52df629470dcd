"""Files of artifacts on this machine, compared with what their manifest says."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 256 * 1024
"""Bytes that are read at once, so that an artifact of any size needs little memory."""


@dataclass(frozen=True, slots=True)
class FileMismatch:
    """A file that is not the artifact: `problem` is a phrase, `found` its sha256, "" if it was not read."""

    problem: str
    found: str = ""


def file_digest(path: Path, limit: int | None = None) -> str:
    """Return the sha256 of a file, or of its first `limit` bytes; raises OSError."""
    digest, left = hashlib.sha256(), limit
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES if left is None else min(CHUNK_BYTES, left)):
            digest.update(chunk)
            left = None if left is None else left - len(chunk)
    return digest.hexdigest()


def compare_file(path: Path, size: int, sha256: str) -> FileMismatch | None:
    """Return how a file differs from its artifact, None if it is the artifact."""
    try:
        found_size, found = path.stat().st_size, file_digest(path)
    except OSError as error:
        return FileMismatch(f"cannot be read: {error.strerror or error}")
    if found == sha256:
        return None
    return FileMismatch(f"is truncated to {found_size} bytes" if found_size < size else "is altered", found)


def mismatch_text(title: str, problem: str, found: str, wanted: str, action: str) -> str:
    """Return the sentence about an artifact that is refused, with both digests."""
    return f"{title}: {problem}: sha256 {found}, the manifest has {wanted}; {action}"
