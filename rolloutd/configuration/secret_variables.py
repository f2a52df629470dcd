"""Secrets among host variables, recognised by name or form.

The daemon holds them in memory, from the latest answer of the inventory.  The database never has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

from rolloutd.ports import JSON, WITHHELD
from rolloutd.texts.secret_urls import has_secret

_SECRET_NAME = re.compile(
    r"pass(word|wd|phrase)?(_|$)|passw|pwd|(^|_)pw(_|$)|secret|token|credential|(^|_)vault(_|$)"
    r"|(api|access|auth|encryption|private|signing)_?key",
    re.IGNORECASE,
)
"""Names such as ansible_become_password, api_key, vault_db, and the key of a value of Ansible Vault."""

_REFERENCE_NAME = re.compile(r"_(file|path)$", re.IGNORECASE)
"""Names of variables that say where a secret is, such as ansible_ssh_private_key_file."""

_SECRET_TEXT = re.compile(r"PRIVATE KEY-----|sshpass\s+-p")
"""A private key in PEM, a proxy command with a password."""

_SECRET_TEXT_PARTS = ("PRIVATE KEY", "://", "sshpass")
"""A text without one of these does not match; a fleet has a million texts, and this test is fast."""

SECRETS_MARK = "rolloutd_no_log"
"""Variable of an inventory that lists the names of a node's further secret variables."""

VAULT_KEY = "__ansible_vault"
"""Key of a value that Ansible Vault encrypted, in the listing of ansible-inventory."""


def storable_variables(variables: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return the variables without secrets, marked with WITHHELD if there were any."""
    kept: dict[str, JSON] = map_secrets(variables, lambda name, value: _REMOVED, marked_secrets(variables))
    return variables if kept == variables else {**kept, WITHHELD: True}


def marked_secrets(variables: Mapping[str, JSON]) -> frozenset[str]:
    marked = variables.get(SECRETS_MARK)
    return frozenset(map(str, marked)) if isinstance(marked, list) else frozenset()


def map_secrets(
    value: Any, replace_secret: Callable[[str, Any], Any], marked: Collection[str], name: str = ""
) -> Any:
    """Return the value with what `replace_secret` makes of each secret in it.

    It gets the name of the variable or key, and the value.  `marked` are further names of secrets.
    """
    if isinstance(value, list):
        return [
            item
            for each in value
            if (item := _map_secret(each, replace_secret, marked, name)) is not _REMOVED
        ]
    if not isinstance(value, Mapping):
        return value
    return {
        key: item
        for key, each in value.items()
        if (item := _map_secret(each, replace_secret, marked, key, by_name=True)) is not _REMOVED
    }


def _map_secret(
    value: Any,
    replace_secret: Callable[[str, Any], Any],
    marked: Collection[str],
    name: str,
    *,
    by_name: bool = False,
) -> Any:
    is_secret = _is_secret_text(value) or (isinstance(value, Mapping) and VAULT_KEY in value)
    if is_secret or (by_name and (name in marked or _is_secret_name(name))):
        return replace_secret(name, value)
    return map_secrets(value, replace_secret, marked, name)


_REMOVED = object()
"""What stands for a secret that is removed."""


@lru_cache(maxsize=4096)
def _is_secret_name(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _REFERENCE_NAME.search(name)


def _is_secret_text(value: Any) -> bool:
    if not isinstance(value, str) or not any(part in value for part in _SECRET_TEXT_PARTS):
        return False
    return bool(_SECRET_TEXT.search(value)) or has_secret(value)
