"""Segments: files with the audit's oldest entries, which the database no longer has.

A segment is a gzip file of lines.  The first is its header, the last its seal; between them is each entry's
canonical JSON, one a line.  The hashes follow from the header's `previous` and the texts:

    {"entries":2,"first":1,"format":"rolloutd-audit-segment/1","last":2,"previous":"000..."}
    {"actor":...,"seq":1}
    {"actor":...,"seq":2}
    {"digest":"...","head":"...","signature":"..."}

`digest` is the SHA-256 of all lines before the seal, `head` the hash of the last entry, and `signature` the
HMAC-SHA-256 of both with the key of the audit checkpoint.  This module knows neither the daemon nor the
database nor the meaning of an entry.
"""

from __future__ import annotations

import gzip
import hashlib
import hmac
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Self, cast

from rolloutd.audit.audit_chain import GENESIS_HASH, ChainVerification, canonical_json, hash_entry
from rolloutd.errors import RolloutdError

SEGMENTS_DIRECTORY = "audit-segments"

FORMAT: Final = "rolloutd-audit-segment/1"

MAX_LINE_BYTES = 64 * 1024 * 1024
"""Longest line that is read: an entry of 500 nodes has some hundred KB, and a damaged file may have any."""

COMPRESSION_LEVEL = 6
"""Zlib's own choice: 9 makes entries two percent smaller in three times the time."""

_NAME = re.compile(r"audit-(\d{12})-(\d{12})\.jsonl\.gz")

Entry = tuple[int, str, str]
"""Number, text and hash of an audit entry."""


class InvalidSegment(RolloutdError):
    """A segment that is not as it was written."""


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment by its name: numbers of its first and last entry."""

    path: Path
    first: int
    last: int


def segment_path(directory: Path, first: int, last: int) -> Path:
    return directory / f"audit-{first:012}-{last:012}.jsonl.gz"


def list_segments(directory: Path) -> list[SegmentFile]:
    """Return the segments of a directory by their numbers; raises OSError.  None for a missing directory."""
    if not directory.exists():
        return []
    matches = ((path, _NAME.fullmatch(path.name)) for path in directory.iterdir())
    files = [SegmentFile(path, int(match[1]), int(match[2])) for path, match in matches if match]
    return sorted(files, key=lambda file: (file.first, file.last))


class SegmentWriter:
    """Writes one segment under a temporary name, which becomes its own when it is complete and on disk."""

    def __init__(self, directory: Path, first: int, last: int, previous: str, key: bytes) -> None:
        """Begin a segment; raises OSError."""
        _make_directory(directory)
        for left in directory.glob(".audit-*.new"):  # by a daemon that was killed
            left.unlink()
        self.path = segment_path(directory, first, last)
        self._temporary = directory / f".{self.path.name}.new"
        self._key = key
        self._first, self._next, self._last, self._head = first, first, last, previous
        self._digest = hashlib.sha256()
        descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "wb")
        # Without time and name: the same entries give the same file.
        self._gzip = gzip.GzipFile("", "wb", COMPRESSION_LEVEL, self._file, mtime=0)
        header = {"entries": last - first + 1, "first": first, "format": FORMAT, "last": last}
        self._write_line(canonical_json({**header, "previous": previous}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._temporary.unlink(missing_ok=True)
        with suppress(OSError):  # on a full disk it writes what is left, and fails again
            self._file.close()

    def add(self, entries: Iterable[Entry]) -> None:
        """Append entries: number, text and hash; raises InvalidSegment for a broken chain, OSError."""
        for seq, text, entry_hash in entries:
            if seq != self._next or seq > self._last or hash_entry(self._head, text) != entry_hash:
                raise InvalidSegment(
                    f"audit entry {seq}: it does not follow from entry {self._next - 1}; see audit verify"
                )
            self._write_line(text)
            self._next, self._head = seq + 1, entry_hash

    def finish(self) -> SegmentFile:
        """Seal the segment, write it to disk and give it its name; raises InvalidSegment, OSError."""
        if self._next != self._last + 1:
            raise InvalidSegment(f"audit entry {self._next}: it is missing; see audit verify")
        digest = self._digest.hexdigest()
        signature = _sign(self._key, digest, self._head)
        self._write_line(canonical_json({"digest": digest, "head": self._head, "signature": signature}))
        self._gzip.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._temporary.rename(self.path)
        _fsync_directory(self.path.parent)
        return SegmentFile(self.path, self._first, self._last)

    def _write_line(self, text: str) -> None:
        line = text.encode() + b"\n"
        self._digest.update(line)
        self._gzip.write(line)


def read_segment(file: SegmentFile, previous: str | None, key: bytes = b"") -> Iterator[Entry]:
    """Yield the entries of a segment that follows an entry with the hash `previous`, then check its seal.

    Without a hash its header's is taken, without a key the signature is not checked.  Raises InvalidSegment,
    OSError.
    """
    path = file.path
    try:
        with gzip.open(path, "rb") as lines:
            yield from _read_lines(file, cast(BinaryIO, lines), previous, key)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidSegment(f"{path}: truncated or damaged ({error}); restore it from a copy") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidSegment(f"{path}: not a segment ({error!r}); restore it from a copy") from error


def _read_lines(file: SegmentFile, lines: BinaryIO, previous: str | None, key: bytes) -> Iterator[Entry]:
    path, digest = file.path, hashlib.sha256()
    line = _read_line(lines)
    header = json.loads(line)
    head: str = header["previous"] if previous is None else previous
    if header["format"] != FORMAT:
        raise InvalidSegment(f"{path}: another format ({header['format']!r}); use the version that wrote it")
    if (header["first"], header["last"], header["previous"]) != (file.first, file.last, head):
        raise InvalidSegment(f"{path}: it does not follow from entry {file.first - 1}; restore the right one")
    for seq in range(file.first, file.last + 1):
        digest.update(line)
        line = _read_line(lines)
        text = line[:-1].decode("ascii")
        if not text.endswith(f',"seq":{seq}}}'):
            raise InvalidSegment(f"{path}: entry {seq} is missing or altered; restore it from a copy")
        head = hash_entry(head, text)
        yield seq, text, head
    digest.update(line)
    seal = json.loads(_read_line(lines))
    if lines.read(1):
        raise InvalidSegment(f"{path}: something follows its seal; restore it from a copy")
    if (seal["digest"], seal["head"]) != (digest.hexdigest(), head):
        raise InvalidSegment(f"{path}: one of its entries was altered; restore it from a copy")
    if key and not hmac.compare_digest(_sign(key, seal["digest"], head), str(seal["signature"])):
        raise InvalidSegment(f"{path}: not signed with this machine's key; find out who wrote it")


def verify_segment(file: SegmentFile, previous: str | None, key: bytes = b"") -> str:
    """Read a segment whole and return the hash of its last entry; raises InvalidSegment, OSError."""
    head = ""
    for entry in read_segment(file, previous, key):
        head = entry[2]
    return head


def read_segments(directory: Path, through: int, head: str, key: bytes = b"") -> Iterator[Entry]:
    """Yield all entries up to the one whose hash is `head`.

    Raises InvalidSegment for a segment that is missing, altered or of another chain; OSError.
    """
    seq, previous = 0, GENESIS_HASH
    last = previous
    for file in list_segments(directory):
        if file.last > through:
            break  # a daemon that was killed has written it, and not yet removed what it holds
        if file.first != seq + 1:
            missing = f"entries {seq + 1} to {file.first - 1} are missing"
            raise InvalidSegment(f"{file.path}: {missing} before it; restore the segment from a copy")
        for entry in read_segment(file, previous, key):
            seq, _, last = entry
            yield entry
        previous = last
    if seq != through:
        raise InvalidSegment(f"{directory}: entries {seq + 1} to {through} are missing; restore the segments")
    if previous != head:
        raise InvalidSegment(f"{directory}: entry {through} is not that of the database; find its segments")


def verify_segments(directory: Path, through: int, head: str, key: bytes = b"") -> ChainVerification:
    """Verify the segments up to an entry and its hash; damage and an unreadable file are results."""
    seq, last = 0, GENESIS_HASH
    try:
        for entry in read_segments(directory, through, head, key):
            seq, _, last = entry
    except (InvalidSegment, OSError) as error:
        return ChainVerification(False, seq, last, seq + 1, str(error))
    return ChainVerification(True, seq, last, None, f"{seq} entries in {directory}")


def _read_line(file: BinaryIO) -> bytes:
    line: bytes = file.readline(MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise EOFError("a line has no end")
    return line


def _sign(key: bytes, digest: str, head: str) -> str:
    return hmac.new(key, f"{FORMAT} {digest} {head}".encode(), hashlib.sha256).hexdigest()


def _make_directory(directory: Path) -> None:
    if not directory.exists():
        directory.mkdir(mode=0o700)
        _fsync_directory(directory.parent)


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
