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
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

PREFIX = "rdt1"
"""Marks a token and its format, so that scanners find leaked ones."""

MAX_TOKEN_CHARS = 16_384
"""Characters of a token: a proceed vote that names some hundred failures."""

MIN_SECRET_BYTES = 32
"""Bytes of an HMAC key: as many as the hash has."""

MAX_TOKEN_LIFETIME_S = 7 * 86_400.0
"""Maximum validity: a change ticket is open for a week, and a leaked token should not be valid longer."""

_ED25519_LENGTH = 64


class InvalidToken(ValueError):
    """The token is malformed or its signature is wrong."""


def _require_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError("not one line of text")
    return text


_Text = Annotated[str, Field(max_length=2_000), AfterValidator(_require_line)]
_Names = Annotated[tuple[_Text, ...], Field(max_length=1_000)]
_EpochSeconds = Annotated[float, Field(ge=0, lt=1e11)]


class Claims(BaseModel):
    """A token's content; `outside` is the person's name in the service."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    service: _Text
    rollout: _Text
    gate: Literal["pilot", "start", "continue", "proceed"]
    digest: _Text
    answer: Literal["yes", "no", "withdraw"]
    outside: _Text
    expires: _EpochSeconds
    nonce: Annotated[_Text, Field(min_length=16)]
    reason: _Text
    team: _Text | None = None
    wave: _Text | None = None
    shown: _Names | None = None
    nodes: _Names = ()
    more: Annotated[int, Field(ge=0, le=1_000)] = 0
    until: _EpochSeconds | None = None
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
    try:
        # As JSON, in which a list is a tuple also where nothing else is converted.
        return Claims.model_validate_json(json.dumps(payload))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        claim = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise InvalidToken(f"the token: unknown claim {claim!r}; sign one without it") from None
        problem = first["msg"].removeprefix("Value error, ")
        raise InvalidToken(f"the token: wrong claim {claim!r} ({problem}); sign one with another") from None


def _encode_base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decode_base64url(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise InvalidToken("the token: not base64url; sign it again") from None
