"""The intended configuration of a node: canonical, without secrets, comparable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from machines.model.plan import MaintainStage, Plan
from rolloutd.configuration.documents import (
    configuration_hash,
    differences,
    earlier_configuration_hash,
    intended_configuration,
    load_redaction_key,
    shown_document,
)
from rolloutd.configuration.secret_variables import storable_variables
from rolloutd.configuration.shown_variables import DIGEST_PREFIX
from rolloutd.errors import StoreFailed
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


KEY = b"key"

PLAN = plan_of(stages=(MaintainStage("configure", "site.yml", {"somaxconn": 4096, "tls_token": SECRET}),))


def document(
    key: bytes = KEY, plan: Plan = PLAN, allowed: Sequence[str] = ("*",), **changed: Any
) -> dict[str, Any]:
    """Return the configuration of a plan that sets somaxconn."""
    return intended_configuration(plan, SOURCE, {**INVENTORY, **changed}, key, allowed)


def hash_of(**changed: Any) -> str:
    return configuration_hash(PLAN, SOURCE, {**INVENTORY, **changed}, KEY)


def test_plan_takes_precedence_over_the_inventory() -> None:
    found = document()
    assert found["variables"]["somaxconn"] == 4096
    assert (found["commit"], found["groups"]) == ("git:abc123", ["gpu"])
    assert found["stages"] == {"configure": {"playbook": "site.yml", "variables": {}}}


def test_later_stage_shows_only_what_differs() -> None:
    first = MaintainStage("a", "a.yml", {"size": 1, "color": "red"})
    found = document(plan=plan_of(stages=(first, MaintainStage("b", "b.yml", {"size": 2, "color": "red"}))))
    assert found["variables"]["size"] == 1
    assert found["stages"]["b"]["variables"] == {"size": 2}


def test_secrets_are_keyed_hashes() -> None:
    found, text = document(), json.dumps(document())
    assert SECRET not in text
    assert "rolloutd_no_log" not in text
    hidden = [found["variables"][name] for name in ("db_password", "banner", "motd", "tls_token")]
    hidden += [found["variables"]["app"]["api_key"], found["variables"]["urls"][0]]
    assert all(each.startswith(DIGEST_PREFIX) for each in hidden)
    assert found["variables"]["app"]["port"] == 80
    assert document(b"another")["variables"]["db_password"] != found["variables"]["db_password"]


def test_equal_values_have_one_hash_and_a_changed_secret_another() -> None:
    reordered = dict(reversed(list(INVENTORY.items())))
    assert hash_of() == hash_of(**reordered)
    assert hash_of() != hash_of(db_password="other")
    assert hash_of() != hash_of(somaxcon=129)


def test_hash_before_the_allow_list_is_still_recognised() -> None:
    everything = document()
    assert everything.pop("shown", None) is None
    text = json.dumps(everything, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert earlier_configuration_hash(PLAN, SOURCE, INVENTORY, KEY) == sha256(text.encode()).hexdigest()


def test_difference_of_a_secret_shows_none() -> None:
    changed = document(db_password="swordfish", somaxconn=1, extra={"a": 1})
    found = differences(document(), changed, KEY, ["*"])
    assert [each.name for each in found] == ["db_password", "extra.a"]
    assert "swordfish" not in str(found)
    assert SECRET not in str(found)
    assert found[1].before is None


def test_names_that_nobody_allows_are_digests() -> None:
    found = document(allowed=(), psk=SECRET, dsn=[SECRET, {"inner": SECRET}], size=128, on=True)
    assert SECRET not in json.dumps(found)
    variables = found["variables"]
    assert [str(variables[name])[: len(DIGEST_PREFIX)] for name in ("psk", "size", "on", "somaxconn")] == [
        DIGEST_PREFIX
    ] * 4
    assert variables["dsn"][1]["inner"].startswith(DIGEST_PREFIX)


def test_plan_shows_its_own_variables_only() -> None:
    plan = plan_of(stages=PLAN.stages, shown_variables=("soma*", "ansible_host", "tls_token"))
    variables = document(plan=plan, allowed=())["variables"]
    assert variables["somaxconn"] == 4096
    assert variables["ansible_host"].startswith(DIGEST_PREFIX)
    assert variables["tls_token"].startswith(DIGEST_PREFIX), "its name says that it is a secret"


def test_settings_that_show_less_hide_stored_values() -> None:
    plan = plan_of(stages=PLAN.stages, shown_variables=("somaxconn",))
    stored = document(plan=plan, allowed=("ansible_*",))
    assert stored["variables"]["ansible_host"] == "10.0.0.1"
    seen = shown_document(stored, KEY, ())
    assert seen["variables"]["ansible_host"] == document(allowed=())["variables"]["ansible_host"]
    assert seen["variables"]["somaxconn"] == 4096
    assert "shown" not in seen


def test_value_that_is_shown_on_one_side_is_no_difference() -> None:
    hidden, shown = document(allowed=()), document()
    assert differences(hidden, shown, KEY, ["*"]) == ()
    (changed,) = differences(hidden, document(ansible_host="10.0.0.2"), KEY, ["*"])
    assert (changed.name, changed.after) == ("ansible_host", "10.0.0.2")
    assert str(changed.before).startswith(DIGEST_PREFIX)


def test_marked_variable_is_not_stored() -> None:
    assert SECRET not in str(storable_variables(INVENTORY))
    assert storable_variables(INVENTORY)["rolloutd_no_log"] == ["banner"]


def test_named_key_must_be_there(tmp_path: Path) -> None:
    named = tmp_path / "named.key"
    with pytest.raises(StoreFailed, match="it cannot be read"):
        load_redaction_key(tmp_path, named)
    named.write_bytes(b"short")
    with pytest.raises(StoreFailed, match="it is too short; write 32 random bytes"):
        load_redaction_key(tmp_path, named)
    named.write_bytes(b"k" * 32)
    assert load_redaction_key(tmp_path, named) == b"k" * 32


def test_key_is_made_once_and_private(tmp_path: Path) -> None:
    key = load_redaction_key(tmp_path)
    assert load_redaction_key(tmp_path) == key
    (file,) = tmp_path.iterdir()
    assert (file.stat().st_mode & 0o777, len(key)) == (0o600, 32)
