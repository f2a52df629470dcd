"""Signed, single-use tokens for votes from a ticket system or a chat.

A token contains the whole vote: service, person, rollout, gate, digest, answer and
expiry.  Its bearer can use it once and cannot change it.  It is signed with
HMAC-SHA256 (shared secret) or Ed25519 (the daemon has only the public key).

Pure functions on text and keys: the store knows used tokens, voting.py the rules.
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
"""Marks a token and its format, so that scanners find leaked ones."""

MAX_TOKEN_CHARS = 16_384
"""Characters of a token: a proceed vote that names some hundred failures."""

MIN_SECRET_BYTES = 32
"""Bytes of an HMAC key: as many as the hash has."""

MAX_TOKEN_LIFETIME_S = 7 * 86_400.0
"""Maximum validity: a change ticket is open for a week, and a leaked token should not be valid longer."""

_ED25519_LENGTH = 64
_ANSWERS = ("yes", "no", "withdraw")
_GATES = ("pilot", "start", "continue", "proceed")
_TEXT_FIELDS = ("service", "rollout", "gate", "digest", "answer", "outside", "nonce", "reason")
_MAX_TEXT_CHARS = 2_000
_MIN_NONCE_CHARS = 16


class InvalidToken(ValueError):
    """The token is malformed or its signature is wrong."""


@dataclass(frozen=True, slots=True)
class Claims:
    """A token's content; `expires` is epoch seconds, `outside` is the person's name in the service."""

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
    unseen: bool = False

    @property
    def id(self) -> str:
        """The key under which the store records a used token."""
        return f"{self.service}:{self.nonce}"


def read_service_name(token: str) -> str:
    """Return the service that a token names, before its signature is checked; raises InvalidToken."""
    return str(_parse_payload(_split(token)[0]).get("service", ""))


def verify(token: str, key: bytes) -> Claims:
    """Return a token's claims if its signature is right; raises InvalidToken."""
    body, signature = _split(token)
    if not _is_signed(f"{PREFIX}.{body}".encode(), signature, key):
        raise InvalidToken("the token: not signed with that service's key; sign it again")
    # Only now: nothing of an unsigned token is interpreted but the name of its service.
    return _parse_claims(_parse_payload(body))


def sign(payload: Mapping[str, Any], secret: bytes) -> str:
    """Return a token with an HMAC signature; `payload` has the fields of Claims.  Raises InvalidToken."""
    _require_secret_length(secret)
    _parse_claims(payload)
    body = _encode_base64url(json.dumps(payload, sort_keys=True, separators=(",", ":")).encode())
    signed = f"{PREFIX}.{body}"
    return f"{signed}.{_encode_base64url(hmac.digest(secret.strip(), signed.encode(), hashlib.sha256))}"


def _split(token: str) -> tuple[str, bytes]:
    parts = token.strip().split(".")
    if len(token) > MAX_TOKEN_CHARS or len(parts) != 3 or parts[0] != PREFIX:
        raise InvalidToken(f"the token: malformed; it needs three parts and the prefix {PREFIX}.")
    return parts[1], _decode_base64url(parts[2])


def _is_signed(text: bytes, signature: bytes, key: bytes) -> bool:
    if b"-----BEGIN" not in key:
        _require_secret_length(key)
        # In constant time: the time must not show how much of a guess is right.
        return hmac.compare_digest(hmac.digest(key.strip(), text, hashlib.sha256), signature)
    if len(signature) != _ED25519_LENGTH:
        return False
    # Imported here because it is slow and most services use a shared secret.
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        public = load_pem_public_key(key)
    except ValueError as error:
        raise InvalidToken(f"the service's key file: not a public key ({error}); replace it") from None
    if not isinstance(public, Ed25519PublicKey):
        raise InvalidToken("the service's key file: not an Ed25519 key; replace it")
    try:
        public.verify(signature, text)
    except InvalidSignature:
        return False
    return True


def _require_secret_length(secret: bytes) -> None:
    # Stripped everywhere: editors add a line break to a key file.
    if len(secret.strip()) < MIN_SECRET_BYTES:
        raise InvalidToken(
            f"the service's key file: fewer than {MIN_SECRET_BYTES} bytes; use a longer secret"
        )


def _parse_payload(body: str) -> dict[str, Any]:
    try:
        payload = json.loads(_decode_base64url(body))
    except (ValueError, RecursionError):
        payload = None
    if not isinstance(payload, dict):
        raise InvalidToken("the token: its middle part is not a JSON object; sign it again")
    return payload


def _parse_claims(payload: Mapping[str, Any]) -> Claims:
    unknown = set(payload) - set(Claims.__dataclass_fields__)
    if unknown:
        raise InvalidToken(f"the token: unknown claim {sorted(unknown)[0]!r}; sign one without it")
    for name in _TEXT_FIELDS:
        _require_text(name, payload.get(name))
    for name in ("team", "wave"):
        if payload.get(name) is not None:
            _require_text(name, payload[name])
    if payload["gate"] not in _GATES or payload["answer"] not in _ANSWERS:
        raise InvalidToken(
            f"the token: gate must be one of {', '.join(_GATES)}, answer one of {', '.join(_ANSWERS)}"
        )
    if len(payload["nonce"]) < _MIN_NONCE_CHARS:
        raise InvalidToken(f"the token: nonce of fewer than {_MIN_NONCE_CHARS} characters; use a longer one")
    more = payload.get("more", 0)
    if type(more) is not int or not 0 <= more <= 1_000:
        raise InvalidToken("the token: `more` must be a number from 0 to 1000")
    if type(payload.get("unseen", False)) is not bool:
        raise InvalidToken("the token: `unseen` must be true or false")
    shown = payload.get("shown")
    return Claims(
        **{name: payload[name] for name in _TEXT_FIELDS},
        expires=_parse_epoch_seconds("expires", payload.get("expires")),
        team=payload.get("team"),
        wave=payload.get("wave"),
        shown=None if shown is None else _parse_names("shown", shown),
        nodes=_parse_names("nodes", payload.get("nodes", [])),
        more=more,
        unseen=payload.get("unseen", False),
        until=None if payload.get("until") is None else _parse_epoch_seconds("until", payload["until"]),
    )


def _require_text(name: str, value: object) -> None:
    is_valid = isinstance(value, str) and 0 < len(value.strip()) <= _MAX_TEXT_CHARS and value.isprintable()
    if not is_valid:
        raise InvalidToken(f"the token: `{name}` must be one line of text")


def _parse_epoch_seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e11:
        raise InvalidToken(f"the token: `{name}` must be epoch seconds")
    return float(value)


def _parse_names(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or len(value) > 1_000:
        raise InvalidToken(f"the token: `{name}` must be a list of names")
    for each in value:
        _require_text(name, each)
    return tuple(value)


def _encode_base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decode_base64url(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise InvalidToken("the token: not base64url; sign it again") from None
