"""Variables of nodes in the database: sealed with the redaction key, without the secrets that are recognised.

A node's other variables may be secrets under any name, and a restart needs them before the sources answer.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from rolloutd.audit.audit_chain import canonical_json
from rolloutd.configuration.secret_variables import storable_variables
from rolloutd.ports import JSON, PROVIDER_ID, WITHHELD

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

SEALED = "rolloutd_sealed"
"""Key of a stored connection with the sealed variables."""

PLAIN_KEYS = (WITHHELD, PROVIDER_ID)
"""Keys that stay readable: nodes keep their names by them, also with a lost key."""


def seal(variables: Mapping[str, JSON], key: bytes) -> dict[str, JSON]:
    """Return what the database has of the variables; equal variables are sealed to equal texts."""
    kept = storable_variables(variables)
    plain = {name: kept[name] for name in PLAIN_KEYS if name in kept}
    rest = {name: value for name, value in kept.items() if name not in plain}
    if not rest:
        return plain
    sealed = _cipher(key).encrypt(canonical_json(rest).encode("utf-8", "surrogatepass"), None)
    return {**plain, SEALED: base64.b64encode(sealed).decode()}


def unseal(stored: Mapping[str, JSON], key: bytes) -> Mapping[str, JSON]:
    """Return the stored variables; with another key they are withheld until their sources report them."""
    if SEALED not in stored:
        return stored
    from cryptography.exceptions import InvalidTag

    plain = {name: value for name, value in stored.items() if name != SEALED}
    try:
        text = _cipher(key).decrypt(base64.b64decode(str(stored[SEALED]), validate=True), None)
    except (InvalidTag, binascii.Error, ValueError):
        return {**plain, WITHHELD: True}
    return {**json.loads(text.decode("utf-8", "surrogatepass")), **plain}


@lru_cache(maxsize=1)
def _cipher(key: bytes) -> AESSIV:
    # Imported only where it is used: it takes 20 ms.  Deterministic, so that an unchanged row is not written.
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

    return AESSIV(hashlib.sha512(b"rolloutd sealed variables\0" + key).digest())
