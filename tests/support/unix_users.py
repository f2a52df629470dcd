"""Real users of this machine, made for a test and removed afterwards, and what each of them asks.

Every user asks through one process of its own that has become that user before it
connects, so that the kernel's word on who asks is what is tested.  Needs root.
It knows the API's socket and no call.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import json
import os
import pwd
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

LOCK = Path("/tmp/rolloutd-test-users.lock")
"""useradd locks /etc/passwd and gives up when it has to wait; so tests wait for each other here."""

_ACCOUNT = ("-M", "-N", "-g", "nogroup", "-s", "/usr/sbin/nologin", "-p", "*")
"""No home and no shell; `*` is no password, and sshd, unlike of `!`, does not take the account for locked."""

_CLIENT_SCRIPT = r"""
import http.client, json, os, pwd, socket, sys
name = sys.argv[1]
entry = pwd.getpwnam(name)
os.initgroups(name, entry.pw_gid)
os.setgid(entry.pw_gid)
os.setuid(entry.pw_uid)

class Connection(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(path)

for line in sys.stdin:
    path, method, target, body, kind = json.loads(line)
    connection = Connection("localhost", timeout=60)
    try:
        content = None if body is None else body.encode("latin-1")
        connection.request(method, target, content, {"Content-Type": kind})
        response = connection.getresponse()
        told = [response.status, response.read().decode("utf-8", "replace")]
    except OSError as error:
        told = [0, type(error).__name__]
    finally:
        connection.close()
    print(json.dumps(told), flush=True)
"""


class UnixUser:
    """One user of this machine, and a process that asks in their name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.uid = pwd.getpwnam(name).pw_uid
        self._process: subprocess.Popen[str] | None = None

    def request(self, path: Path, method: str, target: str, body: Any = None) -> tuple[int, Any]:
        """Return the status and the body of an answer; 0 and an error's name where nobody could be asked.

        `body` is JSON, or bytes of an upload.
        """
        caller = self._process = self._process or self._start()
        raw = isinstance(body, bytes)
        text = body.decode("latin-1") if raw else None if body is None else json.dumps(body)
        kind = "application/x-tar" if raw else "application/json"
        assert caller.stdin is not None
        assert caller.stdout is not None
        caller.stdin.write(json.dumps([str(path), method, target, text, kind]) + "\n")
        caller.stdin.flush()
        status, told = json.loads(caller.stdout.readline())
        lines = [json.loads(line) for line in told.splitlines()] if status else [told]
        return status, lines[0] if len(lines) == 1 else lines

    def stop(self) -> None:
        """End the process that asks."""
        caller, self._process = self._process, None
        if caller is not None:
            assert caller.stdin is not None
            assert caller.stdout is not None
            caller.stdin.close()
            caller.wait(60)
            caller.stdout.close()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CLIENT_SCRIPT, self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


def can_create_users() -> bool:
    """Say whether users can be made here."""
    return os.geteuid() == 0 and Path("/usr/sbin/useradd").exists()


@contextlib.contextmanager
def temporary_users(
    roles: Mapping[str, Sequence[str]],
) -> Iterator[tuple[dict[str, UnixUser], dict[str, str]]]:
    """Make one user per role, in groups of these made-up names; yields both under the names asked for.

    A user's own group is the first one, `nogroup` where none is named.
    """
    mark = secrets.token_hex(3)
    groups = {group: f"rt{mark}-{group}"[:31] for named in roles.values() for group in named}
    users = {role: f"rt{mark}-{role}"[:31] for role in roles}
    made: dict[str, UnixUser] = {}
    try:
        with _locked():
            for name in groups.values():
                _run("groupadd", name)
            for role, named in roles.items():
                more = ",".join(groups[group] for group in named)
                _run("useradd", *_ACCOUNT, *_group_options(more), users[role])
                made[role] = UnixUser(users[role])
        yield made, groups
    finally:
        for person in made.values():
            person.stop()
        with _locked():
            for name in users.values():
                with contextlib.suppress(KeyError):
                    pwd.getpwnam(name)
                    _run("userdel", name)
            for name in groups.values():
                with contextlib.suppress(KeyError):
                    grp.getgrnam(name)
                    _run("groupdel", name)


def _group_options(groups: str) -> list[str]:
    return ["-G", groups] if groups else []


def _run(program: str, *words: str) -> None:
    subprocess.run([f"/usr/sbin/{program}", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
