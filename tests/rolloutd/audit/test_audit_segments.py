"""A segment is read as it was written, or its damage is named."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rolloutd.audit.audit_chain import GENESIS_HASH, canonical_json, hash_entry
from rolloutd.audit.audit_segments import (
    Entry,
    InvalidSegment,
    SegmentFile,
    SegmentWriter,
    list_segments,
    read_segments,
    segment_path,
    verify_segment,
    verify_segments,
)
from tests.acceptance.test_full_disk_and_clock_jumps import fill, small_disk

KEY, SIZE, COUNT = b"k" * 32, 10, 3


def chain(count: int, note: str = "", noise: int = 0) -> list[Entry]:
    entries, head = [], GENESIS_HASH
    for seq in range(1, count + 1):
        note = os.urandom(noise).hex() or note
        text = canonical_json({"at": float(seq), "event": "Noted", "fields": {"note": note}, "seq": seq})
        head = hash_entry(head, text)
        entries.append((seq, text, head))
    return entries


def write_segments(directory: Path, entries: list[Entry], key: bytes = KEY) -> list[SegmentFile]:
    previous = GENESIS_HASH
    for start in range(0, len(entries), SIZE):
        part = entries[start : start + SIZE]
        with SegmentWriter(directory, part[0][0], part[-1][0], previous, key) as writer:
            writer.add(part[:4])
            writer.add(part[4:])
            writer.finish()
        previous = part[-1][2]
    return list_segments(directory)


@pytest.fixture
def entries() -> list[Entry]:
    return chain(SIZE * COUNT)


@pytest.fixture
def files(tmp_path: Path, entries: list[Entry]) -> list[SegmentFile]:
    return write_segments(tmp_path / "segments", entries)


def verify(files: list[SegmentFile], entries: list[Entry], key: bytes = KEY) -> str:
    """Return the problem, the empty string for none."""
    (seq, _, head) = entries[-1]
    report = verify_segments(files[0].path.parent, seq, head, key)
    return "" if report.ok else report.message


def rewrite(file: SegmentFile, change: Callable[[bytes], bytes]) -> None:
    file.path.write_bytes(gzip.compress(change(gzip.decompress(file.path.read_bytes()))))


def test_segments_hold_all_entries(files: list[SegmentFile], entries: list[Entry]) -> None:
    assert [(file.first, file.last) for file in files] == [(1, 10), (11, 20), (21, 30)]
    assert verify(files, entries) == ""
    assert list(read_segments(files[0].path.parent, 30, entries[-1][2], KEY)) == entries
    assert {file.path.stat().st_mode & 0o777 for file in files} == {0o600}


def test_common_tools_read_a_segment(files: list[SegmentFile], entries: list[Entry]) -> None:
    text = subprocess.run(["zcat", str(files[1].path)], capture_output=True, check=True).stdout.decode()
    header, *lines, seal = text.splitlines()
    assert lines == [text for _, text, _ in entries[10:20]]
    assert json.loads(header)["previous"] == entries[9][2]
    assert json.loads(seal)["head"] == entries[19][2]


def test_equal_entries_make_equal_files(
    files: list[SegmentFile], entries: list[Entry], tmp_path: Path
) -> None:
    again = write_segments(tmp_path / "again", entries)
    assert [file.path.read_bytes() for file in again] == [file.path.read_bytes() for file in files]


def test_any_altered_byte_is_reported(files: list[SegmentFile], entries: list[Entry]) -> None:
    content = files[1].path.read_bytes()
    # Not the flags of gzip's header nor what follows them, which nothing reads.
    for place in (*range(3), *range(10, len(content))):
        altered = bytearray(content)
        altered[place] ^= 1
        files[1].path.write_bytes(altered)
        with pytest.raises(InvalidSegment):
            verify_segment(files[1], entries[9][2], KEY)


@pytest.mark.parametrize("change", ["Noted", "12.0", '"seq":1'])
def test_altered_and_compressed_again_is_reported(
    files: list[SegmentFile], entries: list[Entry], change: str
) -> None:
    rewrite(files[1], lambda text: text.replace(change.encode(), change[::-1].encode(), 1))
    assert verify(files, entries)


def test_removed_entry_is_reported(files: list[SegmentFile], entries: list[Entry]) -> None:
    rewrite(files[1], lambda text: b"".join(text.splitlines(keepends=True)[:5] + text.splitlines(True)[6:]))
    assert "entry 15 is missing or altered" in verify(files, entries)


@pytest.mark.parametrize("place", range(COUNT))
def test_missing_segment_is_reported(files: list[SegmentFile], entries: list[Entry], place: int) -> None:
    files[place].path.unlink()
    assert "are missing" in verify(files, entries)


def test_swapped_segments_are_reported(files: list[SegmentFile], entries: list[Entry]) -> None:
    first, second = files[0].path.read_bytes(), files[1].path.read_bytes()
    files[0].path.write_bytes(second)
    files[1].path.write_bytes(first)
    assert "it does not follow from entry 0" in verify(files, entries)


def test_segment_of_another_daemon_is_reported(
    files: list[SegmentFile], entries: list[Entry], tmp_path: Path
) -> None:
    others = write_segments(tmp_path / "others", chain(SIZE * COUNT, "other"), b"o" * 32)
    others[1].path.replace(files[1].path)
    assert "it does not follow from entry 10" in verify(files, entries)


def test_segment_signed_with_another_key_is_reported(
    files: list[SegmentFile], entries: list[Entry], tmp_path: Path
) -> None:
    others = write_segments(tmp_path / "others", entries, b"o" * 32)
    others[1].path.replace(files[1].path)
    assert "not signed with this machine's key" in verify(files, entries)
    assert verify(files, entries, b"") == "", "without the key the chain alone is verified"


def test_rewritten_segments_are_reported(entries: list[Entry], tmp_path: Path) -> None:
    files = write_segments(tmp_path / "others", chain(SIZE * COUNT, "other"))
    assert "is not that of the database" in verify(files, entries)


def test_truncated_segment_is_reported(files: list[SegmentFile], entries: list[Entry]) -> None:
    content = files[2].path.read_bytes()
    for length in range(len(content)):
        files[2].path.write_bytes(content[:length])
        assert verify(files, entries), length


def test_appended_bytes_are_reported(files: list[SegmentFile], entries: list[Entry]) -> None:
    rewrite(files[2], lambda text: text + b"{}\n")
    assert "something follows its seal" in verify(files, entries)


def test_incomplete_segment_gets_no_name(tmp_path: Path, entries: list[Entry]) -> None:
    directory = tmp_path / "segments"
    with SegmentWriter(directory, 1, 10, GENESIS_HASH, KEY) as writer:
        writer.add(entries[:9])
        with pytest.raises(InvalidSegment, match="entry 10: it is missing"):
            writer.finish()
    assert list(directory.iterdir()) == []


def test_broken_chain_is_not_written(tmp_path: Path, entries: list[Entry]) -> None:
    with SegmentWriter(tmp_path / "segments", 1, 10, GENESIS_HASH, KEY) as writer:
        writer.add(entries[:4])
        with pytest.raises(InvalidSegment, match="entry 6: it does not follow from entry 4"):
            writer.add(entries[5:10])


def test_file_left_by_kill_is_removed(tmp_path: Path, entries: list[Entry]) -> None:
    directory = tmp_path / "segments"
    directory.mkdir()
    (directory / ".audit-000000000001-000000000005.jsonl.gz.new").touch()
    write_segments(directory, entries)
    assert len(list(directory.iterdir())) == COUNT
    assert segment_path(directory, 1, 10).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_segment_that_full_disk_ends_takes_no_space(tmp_path: Path) -> None:
    entries = chain(300, noise=1024)
    with small_disk(tmp_path):
        fill(tmp_path / "filler")
        for _ in range(10):  # it may be full in the middle of a write, or between two
            os.truncate(tmp_path / "filler", (tmp_path / "filler").stat().st_size - 4096)
            with pytest.raises(OSError, match="No space left"):
                write_segment(tmp_path, entries)
            assert [each.name for each in tmp_path.iterdir()] == ["filler"]


def write_segment(directory: Path, entries: list[Entry]) -> None:
    with SegmentWriter(directory, 1, len(entries), GENESIS_HASH, KEY) as writer:
        for entry in entries:
            writer.add([entry])
        writer.finish()
