"""What nodes must have before the first run: user, public key, sudo, the fence's directory.

The text and the playbook say the same; neither is run from here.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolloutd.errors import RolloutdError

JSON = Any

KEYGEN_TIMEOUT_S = 20.0
"""Limit of ssh-keygen, which needs milliseconds; a machine without entropy waits."""

KEY_MODE, GROUP_KEY_MODE = 0o600, 0o640
"""Mode of a new key: ssh refuses a key of its own user that others may read, and takes one of root's."""

KEY_COMMENT = "rolloutd"

PLAYBOOK = """\
# Prepares nodes for rolloutd: the login's user, its key and its rights.  Written by `rolloutctl init`.
# Run it once with a login that may become root:
#   ansible-playbook -i INVENTORY prepare-nodes.yml -u YOUR_USER --become
- name: Prepare nodes for rolloutd
  hosts: all
  gather_facts: false
  vars:
    rolloutd_user: {user}
    rolloutd_public_key: {public_key}
    rolloutd_fence_dir: {fence_dir}
    rolloutd_sudoers_dir: /etc/sudoers.d
  tasks:
    - name: Require the key
      ansible.builtin.assert:
        that: rolloutd_public_key != ''
        fail_msg: "rolloutd_public_key: it is empty; give the daemon's public key with -e"

    - name: Make the user
      ansible.builtin.user:
        name: "{{{{ rolloutd_user }}}}"   # a user who exists stays as it is
        password: "*"                   # no password, and not locked: sshd without PAM refuses locked users
        update_password: on_create
      register: account

    - name: Make the directory of keys
      ansible.builtin.file:
        path: "{{{{ rolloutd_ssh_dir | default(account.home ~ '/.ssh') }}}}"
        state: directory
        owner: "{{{{ rolloutd_user }}}}"
        mode: "0700"

    - name: Let the daemon's key log in
      ansible.builtin.lineinfile:
        path: "{{{{ rolloutd_ssh_dir | default(account.home ~ '/.ssh') }}}}/authorized_keys"
        line: "{{{{ rolloutd_public_key }}}}"
        create: true
        owner: "{{{{ rolloutd_user }}}}"
        mode: "0600"

    - name: Let the user become root without a password
      ansible.builtin.copy:
        dest: "{{{{ rolloutd_sudoers_dir }}}}/rolloutd"
        content: "{{{{ rolloutd_user }}}} ALL=(ALL) NOPASSWD: ALL\\n"
        owner: root
        mode: "0440"
        validate: "{{{{ rolloutd_visudo | default('/usr/sbin/visudo') }}}} -cf %s"
      when: rolloutd_user != "root"

    - name: Make the directory of the fence
      ansible.builtin.file:
        path: "{{{{ rolloutd_fence_dir }}}}"
        state: directory
        owner: "{{{{ rolloutd_user }}}}"
        mode: "0700"
"""


class KeyUnusable(RolloutdError):
    """The private key's public half cannot be read, or the key cannot be made."""


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """What each node must have; `public_key` is empty until the key exists.

    `own_keys` is the number of keys where the inventory gives nodes different ones.
    """

    user: str
    public_key: str
    fence_dir: str
    own_keys: int

    @property
    def sudoers_line(self) -> str:
        return "" if self.user == "root" else f"{self.user} ALL=(ALL) NOPASSWD: ALL"

    def lines(self) -> list[str]:
        key = self.public_key or "(the key does not exist yet; run init without --dry-run)"
        if self.own_keys:
            key = f"(the inventory gives {self.own_keys} keys, ansible_ssh_private_key_file of each host)"
        sudoers = self.sudoers_line
        return [
            f"user:    {self.user}, with python3 installed on the node",
            f"key:     in ~{self.user}/.ssh/authorized_keys: {key}",
            *([f"sudo:    in /etc/sudoers.d/rolloutd (0440): {sudoers}"] if sudoers else []),
            f"fence:   {self.fence_dir}, a directory of {self.user}, mode 0700",
        ]

    def playbook(self) -> str:
        values = {"user": self.user, "public_key": self.public_key, "fence_dir": self.fence_dir}
        return PLAYBOOK.format(**{name: _quote(text) for name, text in values.items()})

    def to_json(self) -> dict[str, JSON]:
        return {
            "user": self.user,
            "public_key": self.public_key,
            "sudoers": self.sudoers_line,
            "fence_dir": self.fence_dir,
            "playbook": self.playbook(),
        }


def read_public_key(key_file: Path) -> str:
    """Return the public half of a private key; raises KeyUnusable."""
    public_key = Path(f"{key_file}.pub")
    if public_key.is_file():
        return public_key.read_text(errors="replace").strip()
    # An empty passphrase: a key with one cannot be used by a daemon, and must not ask here.
    return _run_keygen(["-y", "-P", "", "-f", str(key_file)], key_file)


def make_key(key_file: Path, state_dir: Path) -> None:
    """Make an Ed25519 key that only its owner and the daemon's group may read; raises KeyUnusable."""
    key_file.parent.mkdir(parents=True, exist_ok=True)
    _run_keygen(["-q", "-t", "ed25519", "-N", "", "-C", KEY_COMMENT, "-f", str(key_file)], key_file)
    key_file.chmod(KEY_MODE)
    if os.geteuid() == 0 and state_dir.exists() and state_dir.stat().st_uid != 0:
        # The daemon is another user, and the key stays root's: what runs as the daemon cannot replace it.
        os.chown(key_file, 0, state_dir.stat().st_gid)
        key_file.chmod(GROUP_KEY_MODE)


def _run_keygen(arguments: list[str], key_file: Path) -> str:
    try:
        result = subprocess.run(
            ["ssh-keygen", *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=KEYGEN_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KeyUnusable(f"{key_file}: ssh-keygen: {error}; install OpenSSH's client") from error
    if result.returncode != 0:
        problem = (result.stderr or result.stdout).strip().splitlines()[-1:] or ["no output"]
        raise KeyUnusable(f"{key_file}: {problem[0][:200]}; name another key with --ssh-key")
    return result.stdout.strip()


def _quote(text: str) -> str:
    """Return a text as a YAML scalar that Ansible does not render as a template."""
    quoted = text.replace("'", "''")
    return f"'{quoted}'"
