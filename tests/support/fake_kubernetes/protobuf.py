"""Reads the one body that kubectl sends as protobuf: a TokenRequest."""

from __future__ import annotations

from typing import Any

JSON = Any

CONTENT_TYPE = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\x00"
_RAW, _SPEC, _EXPIRATION = 2, 2, 4
"""Numbers of the fields Unknown.raw, TokenRequest.spec and TokenRequestSpec.expirationSeconds."""


def read_token_request(body: bytes) -> JSON:
    """Return a TokenRequest as JSON, with its expirationSeconds."""
    assert body.startswith(_MAGIC)
    spec = _fields(_fields(_fields(body[len(_MAGIC) :])[_RAW])[_SPEC])
    return {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "metadata": {},
        "spec": {"expirationSeconds": spec.get(_EXPIRATION)},
    }


def _fields(data: bytes) -> dict[int, Any]:
    """Return the last value of each field: bytes, or a number."""
    found: dict[int, Any] = {}
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        value, at = _varint(data, at)
        if tag & 7 == 2:  # the number was the length of what follows
            found[tag >> 3], at = data[at : at + value], at + value
        else:
            found[tag >> 3] = value
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at
