"""Variables of nodes as the database has them: sealed, comparable, and readable with one key only."""

from __future__ import annotations

from typing import Any

from rolloutd.configuration.sealed_variables import SEALED, seal, unseal
from rolloutd.ports import PROVIDER_ID, WITHHELD

VARIABLES: dict[str, Any] = {
    "ansible_host": "10.0.0.1",
    "psk": "hunter2",
    "nested": [{"a": None, "b": 1.5}, {"__ansible_unsafe": "{{ x }}"}],
    PROVIDER_ID: "aws:///i-1",
}


def test_sealed_variables_come_back() -> None:
    stored = seal(VARIABLES, b"key")
    assert set(stored) == {SEALED, PROVIDER_ID}
    assert "hunter2" not in str(stored)
    assert unseal(stored, b"key") == VARIABLES
    assert seal(dict(reversed(list(VARIABLES.items()))), b"key") == stored
    assert seal({**VARIABLES, "psk": "other"}, b"key") != stored


def test_known_secret_is_not_sealed_but_withheld() -> None:
    stored = seal({**VARIABLES, "ansible_password": "hunter3"}, b"key")
    assert unseal(stored, b"key") == {**VARIABLES, WITHHELD: True}


def test_lost_key_or_damaged_text_withholds_all() -> None:
    stored = seal(VARIABLES, b"key")
    withheld = {PROVIDER_ID: "aws:///i-1", WITHHELD: True}
    assert unseal(stored, b"another") == withheld
    for damaged in ("", "no base64!", stored[SEALED][:-4], 7, None):
        assert unseal({**stored, SEALED: damaged}, b"key") == withheld


def test_node_without_variables_is_stored_plainly() -> None:
    assert seal({}, b"key") == {}
    assert unseal({}, b"key") == {}
