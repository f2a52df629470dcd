"""Checkpoints of finished stages in a local fact of Ansible on each node."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from pydantic import TypeAdapter

from rolloutd.adapters.ssh.check import stderr_suffix
from rolloutd.adapters.ssh.shell_adapter import run_as_root
from rolloutd.errors import AdapterFailed
from rolloutd.ports import Checkpoint, Host, Shell, without_rollout

DEFAULT_DIRECTORY = "/etc/ansible/facts.d"

DIRECTORY_VARIABLE = "rolloutd_fact_path"
"""The host variable with another directory, for nodes whose playbooks set `fact_path`."""

FILE_NAME = "rolloutd.fact"

FORMAT = 1

MAX_BYTES = 48 * 1024
"""Limit of the fact: less than the shell's limit of output, and room for a hundred stages."""

_READ = 'test ! -f "$1" || head -c "$2" -- "$1"\n'

# The quoted end mark keeps the shell from expanding the fact, which is one line of JSON.
_WRITE = r"""
directory=$1 file=$1/$2 new=$1/.$2.$$
umask 022
mkdir -p "$directory" || exit 1
if [ -d "$file" ]; then echo "$file is a directory" >&2; exit 1; fi
trap 'rm -f "$new"' EXIT
cat >"$new" <<'ROLLOUTD_FACT' && chmod 0644 "$new" && mv -f "$new" "$file"
@FACT@
ROLLOUTD_FACT
"""

_Key = tuple[str, str]
_Change = Callable[[Mapping[_Key, Checkpoint]], Mapping[_Key, Checkpoint]]

_STAGES = TypeAdapter(dict[str, Checkpoint])


class SshCheckpoints:
    """ports.Checkpoints over the daemon's ssh connections."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def read(self, host: Host, *, timeout_s: float) -> Mapping[_Key, Checkpoint] | None:
        # As root: to a login that may not enter the directory the fact looks absent.
        file = f"{_directory(host)}/{FILE_NAME}"
        result = await run_as_root(self._shell, host, _READ, file, str(MAX_BYTES + 1), timeout_s=timeout_s)
        if result.exit_status != 0:
            raise AdapterFailed(f"{host.name}: {file} is not read{stderr_suffix(result)}; check it there")
        return parse_fact(result.stdout) if result.stdout else {}

    async def write(self, host: Host, checkpoint: Checkpoint, *, timeout_s: float) -> None:
        await self._update(
            host, lambda known: {**known, (checkpoint.plan, checkpoint.stage): checkpoint}, timeout_s
        )

    async def remove(self, host: Host, rollout: str, *, timeout_s: float) -> None:
        await self._update(host, lambda known: without_rollout(known, rollout), timeout_s)

    async def _update(self, host: Host, change: _Change, timeout_s: float) -> None:
        lock = self._locks.setdefault(host.name, asyncio.Lock())
        async with asyncio.timeout(timeout_s), lock:  # two rollouts may finish a stage at once
            # An edited fact is replaced: its stages run again rather than count as done.
            known = await self.read(host, timeout_s=timeout_s) or {}
            wanted = change(known)
            if wanted == known:
                return
            script = _WRITE.replace("@FACT@", format_fact(wanted))
            result = await run_as_root(
                self._shell, host, script, _directory(host), FILE_NAME, timeout_s=timeout_s
            )
        if result.exit_status != 0:
            raise AdapterFailed(
                f"{host.name}: {_directory(host)}/{FILE_NAME} is not written{stderr_suffix(result)};"
                " let the login use sudo"
            )


def parse_fact(text: str) -> dict[_Key, Checkpoint] | None:
    """Return the checkpoints of a fact, None if it is not as format_fact() wrote it."""
    if len(text) > MAX_BYTES:
        return None
    try:
        fact = json.loads(text)
        if fact["format"] != FORMAT or fact["digest"] != _digest(fact["stages"]):
            return None
        checkpoints = _STAGES.validate_python(fact["stages"]).values()
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return {(each.plan, each.stage): each for each in checkpoints}


def format_fact(checkpoints: Mapping[_Key, Checkpoint]) -> str:
    """Return the fact as one line; the oldest checkpoints are left out if it is too long."""
    kept = sorted(checkpoints.values(), key=lambda each: each.at)
    while len(text := _fact(kept).encode()) > MAX_BYTES:
        kept = kept[1 + len(kept) // 10 :]
    return text.decode()


def _fact(checkpoints: list[Checkpoint]) -> str:
    stages = _STAGES.dump_python({f"{each.plan}/{each.stage}": each for each in checkpoints}, mode="json")
    return json.dumps({"format": FORMAT, "digest": _digest(stages), "stages": stages}, sort_keys=True)


def _digest(stages: Any) -> str:
    """Return what shows that the fact was not edited."""
    return hashlib.sha256(json.dumps(stages, sort_keys=True).encode()).hexdigest()


def _directory(host: Host) -> str:
    return str(host.connection.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY)
