"""The audit chain: one form for every value, and no tampering that goes unnamed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutd.audit import audit_chain
from rolloutd.errors import NotFound
from rolloutd.store import SqliteBackend, open_store
from rolloutd.store.sqlite import database
from tests.contracts.store_backends import plan_of, rollout_opened, write

ENTRIES = 60

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def write_chain(path: Path, entries: int) -> Path:
    """Write a chain with the real schema."""
    with closing(database.open_writer(path)) as connection:
        connection.execute("BEGIN")
        previous = audit_chain.GENESIS_HASH
        for seq in range(1, entries + 1):
            text = audit_chain.canonical_json(
                {"at": seq / 7, "event": "PhaseMoved", "node": f"n{seq}", "seq": seq}
            )
            previous = audit_chain.hash_entry(previous, text)
            connection.execute("INSERT INTO audit (seq, entry, hash) VALUES (?, ?, ?)", (seq, text, previous))
        connection.execute("COMMIT")
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chain(tmp_path_factory.mktemp("chain") / "whole.sqlite", ENTRIES)


@pytest.fixture
def database_copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(whole, tmp_path / "copy.sqlite"))


@pytest.fixture
def bare(whole: Path) -> Iterator[sqlite3.Connection]:
    """Yield the chain without the schema that would refuse some tamperings by itself."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute("ATTACH ? AS whole", (str(whole),))
        connection.execute("CREATE TABLE audit (seq INTEGER PRIMARY KEY, entry, hash)")
        connection.execute("INSERT INTO audit SELECT seq, entry, hash FROM whole.audit")
        connection.execute("DETACH whole")
        yield connection


def verify(connection: sqlite3.Connection) -> audit_chain.ChainVerification:
    backend = SqliteBackend(Path("bare"))
    rows = backend.read_chain(connection, "audit", 0, 1_000_000)
    return audit_chain.verify_entries(rows, unreadable=backend.errors)


def tamper(path: Path, *statements: tuple[str, tuple[object, ...]]) -> audit_chain.ChainVerification:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for sql, values in statements:
            connection.execute(sql, values)
        return verify(connection)


# -- the form -----------------------------------------------------------------------


@settings(deadline=None)
@given(json_values)
def test_canonical_text_is_ascii_and_means_the_value(value: object) -> None:
    text = audit_chain.canonical_json(value)
    assert text.isascii()
    assert json.loads(text) == value
    assert audit_chain.canonical_json(json.loads(text)) == text


def test_the_order_of_keys_does_not_matter() -> None:
    assert (
        audit_chain.canonical_json({"b": 1, "a": {"d": "é", "c": None}})
        == '{"a":{"c":null,"d":"\\u00e9"},"b":1}'
    )
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            audit_chain.canonical_json(wrong)


def test_a_hash_is_over_the_hash_before_and_the_text() -> None:
    assert audit_chain.hash_entry("ab", "cd") == hashlib.sha256(b"abcd").hexdigest()


# -- what verification finds ----------------------------------------------------------


def test_a_whole_chain_is_good_and_names_its_head(database_copy: Path) -> None:
    verdict = SqliteBackend(database_copy).verify_chain()
    assert verdict.ok
    assert verdict.entries == ENTRIES
    assert verdict.first_bad is None
    for noted in (None, audit_chain.GENESIS_HASH, verdict.head):
        assert SqliteBackend(database_copy).verify_chain(noted).ok


def test_one_entry_is_told_as_one(tmp_path: Path) -> None:
    verdict = SqliteBackend(write_chain(tmp_path / "one", 1)).verify_chain()
    assert verdict.message == "1 entry, each one hashed over the one before"


def test_an_empty_chain_is_good(tmp_path: Path) -> None:
    verdict = SqliteBackend(write_chain(tmp_path / "empty", 0)).verify_chain()
    assert (verdict.ok, verdict.entries, verdict.head) == (True, 0, audit_chain.GENESIS_HASH)


Tampering = Callable[[random.Random], tuple[int, tuple[tuple[str, tuple[object, ...]], ...]]]


def altered(draw: random.Random) -> tuple[int, tuple[tuple[str, tuple[object, ...]], ...]]:
    """Change one byte of one entry."""
    seq = draw.randint(1, ENTRIES)
    text = audit_chain.canonical_json({"at": seq / 7, "event": "PhaseMoved", "node": f"n{seq}", "seq": seq})
    place = draw.randrange(len(text))
    other = draw.choice([char for char in "abcXYZ019{}" if char != text[place]])
    changed = text[:place] + other + text[place + 1 :]
    return seq, (("UPDATE audit SET entry = ? WHERE seq = ?", (changed, seq)),)


def rehashed(draw: random.Random) -> tuple[int, tuple[tuple[str, tuple[object, ...]], ...]]:
    """Change one digit of one hash."""
    seq = draw.randint(1, ENTRIES)
    digit = draw.randint(1, 64)
    sql = (
        "UPDATE audit SET hash = substr(hash, 1, ?1 - 1) || iif(substr(hash, ?1, 1) = '0', '1', '0')"
        " || substr(hash, ?1 + 1) WHERE seq = ?2"
    )
    return seq, ((sql, (digit, seq)),)


def deleted(draw: random.Random) -> tuple[int, tuple[tuple[str, tuple[object, ...]], ...]]:
    """Remove one entry that is not the last."""
    seq = draw.randint(1, ENTRIES - 1)
    return seq, (("DELETE FROM audit WHERE seq = ?", (seq,)),)


def deleted_and_closed_up(draw: random.Random) -> tuple[int, tuple[tuple[str, tuple[object, ...]], ...]]:
    """Remove one entry and move those after it down."""
    seq, (first,) = deleted(draw)
    return seq, (
        first,
        ("UPDATE audit SET seq = -seq WHERE seq > ?", (seq,)),
        ("UPDATE audit SET seq = -seq - 1 WHERE seq < 0", ()),
    )


def swapped(draw: random.Random) -> tuple[int, tuple[tuple[str, tuple[object, ...]], ...]]:
    """Swap two rows."""
    first, second = sorted(draw.sample(range(1, ENTRIES + 1), 2))
    return first, (
        ("UPDATE audit SET seq = -1 WHERE seq = ?", (first,)),
        ("UPDATE audit SET seq = ? WHERE seq = ?", (first, second)),
        ("UPDATE audit SET seq = ? WHERE seq = -1", (second,)),
    )


@pytest.mark.parametrize("kind", [altered, rehashed, deleted, deleted_and_closed_up, swapped])
def test_every_random_tampering_is_found_and_its_first_entry_named(
    bare: sqlite3.Connection, kind: Tampering
) -> None:
    draw = random.Random(kind.__name__)
    for _ in range(250):
        seq, statements = kind(draw)
        bare.execute("BEGIN")
        for sql, values in statements:
            bare.execute(sql, values)
        verdict = verify(bare)
        bare.execute("ROLLBACK")
        assert not verdict.ok
        assert verdict.first_bad == seq, verdict.message
        assert verdict.entries == seq - 1
        assert f"entry {seq}" in verdict.message
    assert verify(bare).ok


def test_rehashed_entry_breaks_next_link(database_copy: Path) -> None:
    text = audit_chain.canonical_json({"at": 1, "event": "Nothing", "seq": 1})
    change = (
        "UPDATE audit SET entry = ?, hash = ? WHERE seq = 1",
        (text, audit_chain.hash_entry(audit_chain.GENESIS_HASH, text)),
    )
    assert tamper(database_copy, change).first_bad == 2


@pytest.mark.parametrize("value", [b"\xff\xfe", b"", None, "é", 7])
def test_what_is_no_text_is_an_altered_entry(bare: sqlite3.Connection, value: object) -> None:
    bare.execute("UPDATE audit SET entry = ? WHERE seq = 5", (value,))
    assert verify(bare).first_bad == 5


def test_a_cut_tail_is_found_only_by_a_noted_head(database_copy: Path) -> None:
    noted = SqliteBackend(database_copy).verify_chain().head
    cut = ("DELETE FROM audit WHERE seq > ?", (ENTRIES - 3,))
    assert tamper(database_copy, cut).ok
    verdict = SqliteBackend(database_copy).verify_chain(noted)
    assert not verdict.ok
    assert verdict.first_bad == ENTRIES - 2
    assert noted in verdict.message


def test_a_flipped_bit_is_found_or_touches_no_entry(whole: Path, tmp_path: Path) -> None:
    draw = random.Random(1)
    content = whole.read_bytes()
    good = SqliteBackend(whole).verify_chain()
    path = tmp_path / "flipped.sqlite"
    found = 0
    for _ in range(200):
        place = draw.randrange(100, len(content))
        flipped = bytes([content[place] ^ (1 << draw.randrange(8))])
        path.write_bytes(content[:place] + flipped + content[place + 1 :])
        verdict = SqliteBackend(path).verify_chain()
        found += not verdict.ok
        assert not verdict.ok or verdict == good
    assert found


# -- files -----------------------------------------------------------------------------


def test_there_must_be_a_file_and_it_must_be_a_database(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        SqliteBackend(tmp_path / "nothing").verify_chain()
    other = tmp_path / "other"
    other.write_bytes(b"no database at all, but long enough" * 20)
    verdict = SqliteBackend(other).verify_chain()
    assert not verdict.ok
    assert str(other) in verdict.message


async def test_a_running_daemon_is_verified_up_to_its_last_commit(tmp_path: Path) -> None:
    store = await open_store(tmp_path, compile_plan=plan_of)
    await write(store, rollout_opened())
    assert SqliteBackend(store.backend.path).verify_chain().entries == 1
    (entry,) = await write(store, rollout_opened("r2"))
    assert SqliteBackend(store.backend.path).verify_chain().head == entry.hash
    await store.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_copy_that_nobody_can_write_is_verified(whole: Path, tmp_path: Path) -> None:
    place = tmp_path / "archive"
    place.mkdir()
    copy = Path(shutil.copy(whole, place / "copy.sqlite"))
    for path in (copy, place):
        path.chmod(0o555)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    program = (
        "import os, sys; from pathlib import Path; from rolloutd.store import SqliteBackend\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "verdict = SqliteBackend(Path(sys.argv[1])).verify_chain(); print(verdict)\n"
        "sys.exit(not verdict.ok)"
    )
    root = Path(__file__).parents[3]
    ended = subprocess.run(
        [sys.executable, "-c", program, str(copy)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted(path.name for path in place.iterdir()) == ["copy.sqlite"]


def test_verification_imports_nothing_heavy() -> None:
    program = (
        "import sys; import rolloutd.audit.audit_chain\n"
        "heavy = {'aiosqlite', 'asyncio', 'machines', 'pydantic', 'transitions', 'rolloutd.store'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or None)"
    )
    root = Path(__file__).parents[3]
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
