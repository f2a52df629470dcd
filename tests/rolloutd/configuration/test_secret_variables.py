"""Host variables that the database has: all but secrets, wherever they are nested."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutd.configuration.secret_variables import storable_variables
from rolloutd.ports import WITHHELD

SECRETS: dict[str, Any] = {
    "ansible_become_password": "x",
    "ansible_become_pass": "x",
    "ansible_password": "x",
    "ansible_ssh_pass": "x",
    "ansible_ssh_private_key_passphrase": "x",
    "ansible_sudo_pass": "x",
    "db_pw": "x",
    "bmc_pwd": "x",
    "vault_db": "x",
    "aws_secret_access_key": "x",
    "registry_auth_key": "x",
    "motd": {"__ansible_vault": "$ANSIBLE_VAULT;1.1;AES256 6162"},
    "tls": "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl\n-----END OPENSSH PRIVATE KEY-----",
    "proxy": "http://ops:x@proxy.example:3128",
    "ansible_ssh_common_args": "-o ProxyCommand='sshpass -p x ssh -W %h:%p jump'",
    "app": {"port": 1, "users": [{"name": "a", "api_key": "x"}]},
    "repository": "HTTPS://x@git.example/r.git",
    "hosts_file": ["http://ops:x@a", "b"],
}

PLAIN: dict[str, Any] = {
    "ansible_host": "10.0.0.1",
    "ansible_port": 22,
    "ansible_private_key_file": "/etc/key",
    "ansible_ssh_private_key_file": "/etc/key",
    "become_password_file": "/etc/pass",
    "ansible_become": True,
    "passive": True,
    "mirror": "https://mirror.example:8443/a@b",
    "keys": ["ssh-ed25519 AAAA a@b"],
}


@pytest.mark.parametrize("name", SECRETS)
def test_secret_is_withheld_and_marked(name: str) -> None:
    stored = storable_variables({name: SECRETS[name], **PLAIN})
    assert stored[WITHHELD] is True
    assert {key: value for key, value in stored.items() if key in PLAIN} == PLAIN
    assert "x" not in str(stored.get(name, "")).split("'")
    assert "VAULT" not in str(stored)
    assert storable_variables(stored) == stored


def test_variables_without_secrets_are_unchanged() -> None:
    assert storable_variables(PLAIN) is PLAIN
