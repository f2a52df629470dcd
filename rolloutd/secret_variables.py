"""Secrets among host variables, recognised by name or form.

The daemon holds them in memory, from the latest answer of the inventory.  The database never has them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rolloutd.ports import JSON, WITHHELD

_SECRET_NAME = re.compile(
    r"pass(word|wd|phrase)?(_|$)|passw|pwd|(^|_)pw(_|$)|secret|token|credential|(^|_)vault(_|$)"
    r"|(api|access|auth|encryption|private|signing)_?key",
    re.IGNORECASE,
)
"""Names such as ansible_become_password, api_key, vault_db, and the key of a value of Ansible Vault."""

_REFERENCE_NAME = re.compile(r"_(file|path)$", re.IGNORECASE)
"""Names of variables that say where a secret is, such as ansible_ssh_private_key_file."""

_SECRET_TEXT = re.compile(r"PRIVATE KEY-----|://[^/@\s]*:[^/@\s]+@|sshpass\s+-p")
"""A private key in PEM, a URL with a password, a proxy command with a password."""

_SECRET_TEXT_PARTS = ("PRIVATE KEY", "://", "sshpass")
"""A text without one of these does not match; a fleet has a million texts, and this test is fast."""


def storable_variables(variables: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return the variables without secrets, marked with WITHHELD if there were any."""
    kept: dict[str, JSON] = _without_secrets(variables)
    return variables if kept == variables else {**kept, WITHHELD: True}


def _without_secrets(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_secrets(item) for item in value if not _is_secret_text(item)]
    if not isinstance(value, Mapping):
        return value
    return {
        name: _without_secrets(item)
        for name, item in value.items()
        if not _is_secret_name(name) and not _is_secret_text(item)
    }


@lru_cache(maxsize=4096)
def _is_secret_name(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _REFERENCE_NAME.search(name)


def _is_secret_text(value: Any) -> bool:
    return (
        isinstance(value, str)
        and any(part in value for part in _SECRET_TEXT_PARTS)
        and bool(_SECRET_TEXT.search(value))
    )
