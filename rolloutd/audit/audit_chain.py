"""The audit's hash chain, with the standard library only.

Each entry of the audit is one line of canonical JSON with a hash of itself and of
the previous hash.  A change, removal or move of an entry changes every later hash,
so the latest hash, kept elsewhere, reveals it.

The store writes and reads chains with these functions.  This module knows neither the
daemon nor the database nor the meaning of an entry.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from json.encoder import c_make_encoder, encode_basestring_ascii  # type: ignore[attr-defined]
from typing import Any

GENESIS_HASH = "0" * 64
"""The hash before the first entry, and the head of an empty chain."""

_SEQ_KEY = b',"seq":'
"""`seq` is the last of an entry's keys in canonical order, so an entry ends with it."""

_NO_PROBLEM: tuple[int | None, str] = (None, "")

_encoder = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
# JSONEncoder.encode() makes this function in each call, which takes longer than to encode a short value.
_encode = c_make_encoder(None, _encoder.default, encode_basestring_ascii, None, ":", ",", True, False, False)


@dataclass(frozen=True, slots=True)
class ChainVerification:
    """The result of a verification.

    `entries` counts the good entries before the first bad one, whose sequence
    number is `first_bad`; `head` is the hash of the last good entry.
    """

    ok: bool
    entries: int
    head: str
    first_bad: int | None
    message: str


def canonical_json(value: Any) -> str:
    """Return the one JSON text of a value: sorted keys, no blanks, ASCII.

    ASCII, so that names that are not valid Unicode also have exactly one form.
    Raises ValueError for infinities and NaN, TypeError for what is not JSON.
    """
    return "".join(_encode(value, 0))


def hash_entry(previous: str, text: str) -> str:
    """Return the hash, 64 hexadecimal digits, of an entry that follows `previous`."""
    return hashlib.sha256((previous + text).encode()).hexdigest()


def verify_entries(
    entries: Iterable[tuple[Any, Any, Any]],
    head: str | None = None,
    visit: Callable[[str], object] | None = None,
    unreadable: tuple[type[Exception], ...] = (),
    *,
    start: tuple[int, str] = (0, GENESIS_HASH),
) -> ChainVerification:
    """Check a chain of numbers, texts and hashes; both are bytes, because damaged ones may not be text.

    `head` is a hash noted earlier; a chain without it is bad too: its tail was cut, or it was rewritten.
    `visit` gets the text of each good entry, also of those after a bad one: an entry is good if its hash
    follows from its text and the recorded hash before it.  The `unreadable` errors of `entries` are a result.
    `start`: number and hash of the entry before the first one, which counts with those before it as good.
    """
    count, previous = start
    head_found, bad = head in (None, GENESIS_HASH, previous), _NO_PROBLEM
    good_head = previous
    expected = count + 1
    try:
        for seq, text, recorded_hash in entries:
            problem = _find_problem(expected, previous, seq, text, recorded_hash)
            if problem and bad is _NO_PROBLEM:
                bad = (count + 1, problem)
                if visit is None:
                    break
            previous, expected = _text(recorded_hash), seq + 1
            if bad is _NO_PROBLEM:
                good_head, count = previous, count + 1
            head_found = head_found or (not problem and previous == head)
            if visit is not None and not problem:
                visit(text.decode())
    except unreadable as error:
        bad = (count + 1, f"the file is damaged at entry {count + 1}: {error}")
    if bad is not _NO_PROBLEM:
        return ChainVerification(False, count, good_head, *bad)
    if not head_found:
        message = (
            f"none of the {count} entries has the hash {head}: the tail was cut after it was noted,"
            " or the whole chain was rewritten"
        )
        return ChainVerification(False, count, good_head, count + 1, message)
    counted = "1 entry" if count == 1 else f"{count} entries"
    return ChainVerification(True, count, good_head, None, f"{counted}, each one hashed over the one before")


def _text(recorded_hash: object) -> str:
    return recorded_hash.decode("utf-8", "replace") if isinstance(recorded_hash, bytes) else ""


def _find_problem(expected: int, previous: str, seq: object, text: object, recorded_hash: object) -> str:
    """Return the problem of an entry, or an empty string."""
    if seq != expected:
        return f"entry {expected} is missing: the next one is {seq}"
    if not isinstance(text, bytes) or not isinstance(recorded_hash, bytes):
        return f"entry {expected} was altered: it is not text"
    if not text.endswith(b"%b%d}" % (_SEQ_KEY, expected)):
        return f"entry {expected} was altered or moved: it does not carry its own number"
    if hashlib.sha256(previous.encode() + text).hexdigest().encode() != recorded_hash:
        return f"entry {expected} was altered: its hash does not follow from its text and the entry before"
    return ""
