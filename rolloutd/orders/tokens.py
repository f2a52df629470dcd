"""Signed, single-use tokens by which a ticket system or a chat hands in somebody's vote.

A token says everything of the vote: which service vouches, for whom, for which
rollout, gate and digest, which answer, until when.  Whoever carries it can use
it once and change nothing in it.  Two ways to sign: HMAC-SHA256 with a secret
that both sides have, and Ed25519, where the daemon has the public key alone.

Pure functions on text and keys: whether a token was used is the store's to
know, what the vote does is voting.py's.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "rdt1"
"""Says what it is and in which format, so that a scanner finds leaked ones."""

LONGEST = 16_384
"""Characters of a token: a proceed vote that names some hundred failures."""

SHORTEST_SECRET = 32
"""Bytes of an HMAC key: as many as the hash has."""

LONGEST_LIFE_S = 7 * 86_400.0
"""How far ahead a token may expire: a change ticket lives a week; a leaked token should live less."""

SPENT = "this token was used before"
"""With these words the store refuses to use a token a second time."""

_ED25519_LENGTH = 64
_ANSWERS = ("yes", "no", "withdraw")
_GATES = ("start", "continue", "proceed")
_TEXTS = ("service", "rollout", "gate", "digest", "answer", "outside", "nonce", "reason")
_MOST_TEXT = 2_000
_SHORTEST_NONCE = 16


class BadToken(ValueError):
    """The token is none, or nobody who may signed it."""


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token says; `expires` is epoch seconds, `outside` names the person where they are known."""

    service: str
    rollout: str
    gate: str
    digest: str
    answer: str
    outside: str
    expires: float
    nonce: str
    reason: str
    team: str | None = None
    wave: str | None = None
    shown: tuple[str, ...] | None = None
    nodes: tuple[str, ...] = ()
    more: int = 0
    until: float | None = None

    @property
    def id(self) -> str:
        """What the token is remembered by once it was used."""
        return f"{self.service}:{self.nonce}"


def peek(token: str) -> str:
    """Return the service that a token names, before anything of it is believed; raises BadToken."""
    return str(_payload(_parts(token)[0]).get("service", ""))


def read(token: str, key: bytes) -> Claims:
    """Return what a token says once its signature is found good; raises BadToken."""
    body, signature = _parts(token)
    if not _is_signed(f"{PREFIX}.{body}".encode(), signature, key):
        raise BadToken("the token's signature is not of that service's key")
    return _claims(_payload(body))


def sign(payload: Mapping[str, Any], secret: bytes) -> str:
    """Return a token with an HMAC signature; `payload` has the fields of Claims.  Raises BadToken."""
    _mind_secret(secret)
    _claims(payload)
    body = _encoded(json.dumps(payload, sort_keys=True, separators=(",", ":")).encode())
    signed = f"{PREFIX}.{body}"
    return f"{signed}.{_encoded(hmac.digest(secret.strip(), signed.encode(), hashlib.sha256))}"


def _parts(token: str) -> tuple[str, bytes]:
    parts = token.strip().split(".")
    if len(token) > LONGEST or len(parts) != 3 or parts[0] != PREFIX:
        raise BadToken(f"this is no token: one has three parts and begins with {PREFIX}.")
    return parts[1], _decoded(parts[2])


def _is_signed(text: bytes, signature: bytes, key: bytes) -> bool:
    if b"-----BEGIN" not in key:
        _mind_secret(key)
        return hmac.compare_digest(hmac.digest(key.strip(), text, hashlib.sha256), signature)
    if len(signature) != _ED25519_LENGTH:
        return False
    # Imported where it is needed: most services share a secret.
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        public = load_pem_public_key(key)
    except ValueError as error:
        raise BadToken(f"the service's key file holds no public key: {error}") from None
    if not isinstance(public, Ed25519PublicKey):
        raise BadToken("the service's key file holds a public key that is not Ed25519")
    try:
        public.verify(signature, text)
    except InvalidSignature:
        return False
    return True


def _mind_secret(secret: bytes) -> None:
    if len(secret.strip()) < SHORTEST_SECRET:
        raise BadToken(f"the service's key file holds fewer than {SHORTEST_SECRET} bytes")


def _payload(body: str) -> dict[str, Any]:
    try:
        payload = json.loads(_decoded(body))
    except (ValueError, RecursionError):
        payload = None
    if not isinstance(payload, dict):
        raise BadToken("the token's middle part is no JSON object")
    return payload


def _claims(payload: Mapping[str, Any]) -> Claims:
    unknown = set(payload) - set(Claims.__dataclass_fields__)
    if unknown:
        raise BadToken(f"the token says {sorted(unknown)[0]!r}, which means nothing here")
    for name in _TEXTS:
        _mind_text(name, payload.get(name))
    for name in ("team", "wave"):
        if payload.get(name) is not None:
            _mind_text(name, payload[name])
    if payload["gate"] not in _GATES or payload["answer"] not in _ANSWERS:
        raise BadToken(
            f"a token's gate is one of {', '.join(_GATES)}, its answer one of {', '.join(_ANSWERS)}"
        )
    if len(payload["nonce"]) < _SHORTEST_NONCE:
        raise BadToken(f"the token's nonce has fewer than {_SHORTEST_NONCE} characters")
    more = payload.get("more", 0)
    if type(more) is not int or not 0 <= more <= 1_000:
        raise BadToken("the token's `more` is no number from 0 to 1000")
    shown = payload.get("shown")
    return Claims(
        **{name: payload[name] for name in _TEXTS},
        expires=_instant("expires", payload.get("expires")),
        team=payload.get("team"),
        wave=payload.get("wave"),
        shown=None if shown is None else _names("shown", shown),
        nodes=_names("nodes", payload.get("nodes", [])),
        more=more,
        until=None if payload.get("until") is None else _instant("until", payload["until"]),
    )


def _mind_text(name: str, value: object) -> None:
    good = isinstance(value, str) and 0 < len(value.strip()) <= _MOST_TEXT and value.isprintable()
    if not good:
        raise BadToken(f"the token's `{name}` is missing, or no text of one line")


def _instant(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e11:
        raise BadToken(f"the token's `{name}` is no instant in epoch seconds")
    return float(value)


def _names(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or len(value) > 1_000:
        raise BadToken(f"the token's `{name}` is no list of names")
    for each in value:
        _mind_text(name, each)
    return tuple(value)


def _encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise BadToken("the token is not in base64url") from None
