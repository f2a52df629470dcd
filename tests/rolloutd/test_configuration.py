"""The intended configuration of a node: canonical, without secrets, comparable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from machines.model.plan import Stage
from rolloutd.configuration import (
    SECRET_PREFIX,
    content_hash,
    differences,
    intended_configuration,
    load_redaction_key,
)
from rolloutd.secret_variables import storable_variables
from tests.machines.builders import plan_of

SOURCE = {"kind": "git", "pin": "abc123"}
SECRET = "hunter2-hunter2"
INVENTORY: dict[str, Any] = {
    "ansible_host": "10.0.0.1",
    "group_names": ["gpu"],
    "somaxconn": 128,
    "db_password": SECRET,
    "banner": SECRET,
    "rolloutd_no_log": ["banner"],
    "app": {"api_key": SECRET, "port": 80},
    "motd": {"__ansible_vault": f"$ANSIBLE_VAULT;1.1;AES256 {SECRET}"},
    "urls": [f"https://ops:{SECRET}@example.net/"],
}


def document(key: bytes = b"key", stages: tuple[Stage, ...] = (), **changed: Any) -> dict[str, Any]:
    """Return the configuration of a plan that sets somaxconn."""
    stages = stages or (Stage("configure", "site.yml", {"somaxconn": 4096, "tls_token": SECRET}),)
    return intended_configuration(plan_of(stages=stages), SOURCE, {**INVENTORY, **changed}, key)


def test_plan_takes_precedence_over_the_inventory() -> None:
    found = document()
    assert found["variables"]["somaxconn"] == 4096
    assert (found["commit"], found["groups"]) == ("git:abc123", ["gpu"])
    assert found["stages"] == {"configure": {"playbook": "site.yml", "variables": {}}}


def test_later_stage_shows_only_what_differs() -> None:
    first = Stage("a", "a.yml", {"size": 1, "color": "red"})
    found = document(stages=(first, Stage("b", "b.yml", {"size": 2, "color": "red"})))
    assert found["variables"]["size"] == 1
    assert found["stages"]["b"]["variables"] == {"size": 2}


def test_secrets_are_keyed_hashes() -> None:
    found, text = document(), json.dumps(document())
    assert SECRET not in text
    assert "rolloutd_no_log" not in text
    hidden = [found["variables"][name] for name in ("db_password", "banner", "motd", "tls_token")]
    hidden += [found["variables"]["app"]["api_key"], found["variables"]["urls"][0]]
    assert all(each.startswith(SECRET_PREFIX) for each in hidden)
    assert found["variables"]["app"]["port"] == 80
    assert document(b"another")["variables"]["db_password"] != found["variables"]["db_password"]


def test_equal_values_have_one_hash_and_a_changed_secret_another() -> None:
    reordered = dict(reversed(list(INVENTORY.items())))
    assert content_hash(document()) == content_hash(document(**reordered))
    assert content_hash(document()) != content_hash(document(db_password="other"))


def test_difference_of_a_secret_shows_none() -> None:
    found = differences(document(), document(db_password="swordfish", somaxconn=1, extra={"a": 1}))
    assert [each.name for each in found] == ["db_password", "extra.a"]
    assert "swordfish" not in str(found)
    assert SECRET not in str(found)
    assert found[1].before is None


def test_marked_variable_is_not_stored() -> None:
    assert SECRET not in str(storable_variables(INVENTORY))
    assert storable_variables(INVENTORY)["rolloutd_no_log"] == ["banner"]


def test_key_is_made_once_and_private(tmp_path: Path) -> None:
    key = load_redaction_key(tmp_path)
    assert load_redaction_key(tmp_path) == key
    (file,) = tmp_path.iterdir()
    assert (file.stat().st_mode & 0o777, len(key)) == (0o600, 32)
