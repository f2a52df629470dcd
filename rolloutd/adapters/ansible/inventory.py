"""The Inventory port by ansible-inventory: static files, directories and dynamic sources alike.

ansible-inventory exits 0 for a source that it could not parse and shows an
empty fleet, so it is told to fail, and an empty fleet is refused all the same:
a fleet that vanishes is a broken source far more often than a wish.  Values
with templates are left as they are: they are rendered where the playbook runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolloutd.adapters.kit import Kit
from rolloutd.errors import SourceFailed
from rolloutd.ports import GROUPS, Found

REFRESH_LIMIT_S = 120.0
"""A dynamic inventory asks a cloud page by page; one that needs longer is broken or far too slow."""

OUTPUT_LIMIT_BYTES = 256 * 1024 * 1024
"""10,000 nodes with a hundred variables each are some 30 MiB."""

COMPLAINT_LIMIT = 2000
"""Characters of ansible-inventory's own words that go into an error."""

MOST_TOLD = 5
"""Mistakes of an inventory that are named; one cause makes them by the thousand, so the rest is counted."""


def make(kit: Kit) -> AnsibleInventory:
    """Return the inventory source `ansible` of the settings."""
    beside = kit.settings.ansible.bin
    binary = None if beside is None else str(beside.with_name("ansible-inventory"))
    return AnsibleInventory(Path(kit.params["path"]), kit.params["labels"], binary)


class AnsibleInventory:
    """The nodes of one Ansible inventory, each with its groups, those above them included."""

    def __init__(
        self,
        path: Path,
        labels: Sequence[str] = (),
        binary: str | None = None,
        *,
        limit_s: float = REFRESH_LIMIT_S,
    ) -> None:
        """Take the inventory's path and the host variables that become labels."""
        self._path = path
        self._labels = tuple(labels)
        self._binary = binary or str(Path(sys.executable).with_name("ansible-inventory"))
        self._limit_s = limit_s

    @property
    def source(self) -> str:
        """The name under which its findings are known."""
        return f"ansible:{self._path}"

    async def refresh(self) -> Sequence[Found]:
        """Return all nodes of the inventory; raises SourceFailed, never returns half."""
        if not self._path.exists():
            raise SourceFailed(f"there is no inventory {self._path}: name an existing file or directory")
        listing = self._read(await self._list())
        hosts = listing.get("_meta", {}).get("hostvars", {})
        members = _members(listing)
        names = sorted(set(hosts).union(*members.values()))
        if not names:
            raise self._failed("it names no host", "add hosts to it, or remove the source from the settings")
        groups: dict[str, list[str]] = {}
        for group in sorted(members.keys() - _IMPLIED):
            for name in members[group]:
                groups.setdefault(name, []).append(group)
        mistakes = [
            mistake
            for name in names
            for label in self._labels
            if (mistake := _mistake(name, label, hosts.get(name, {}).get(label))) is not None
        ]
        if mistakes:
            raise self._refused(mistakes)
        return [self._found(name, hosts.get(name, {}), groups.get(name, [])) for name in names]

    async def _list(self) -> bytes:
        """Run ansible-inventory within its limits and return what it printed."""
        try:
            process = await asyncio.create_subprocess_exec(
                self._binary,
                "--inventory",
                str(self._path.absolute()),
                "--list",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                cwd=self._path.absolute().parent,
                env={**os.environ, **_ENVIRONMENT},
            )
        except OSError as error:
            raise self._failed(f"{self._binary}: {error.strerror}", "install ansible-core") from error
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(self._limit_s):
                async with asyncio.TaskGroup() as group:
                    output = group.create_task(_read_some(process.stdout, OUTPUT_LIMIT_BYTES))
                    complaint = group.create_task(_read_some(process.stderr, OUTPUT_LIMIT_BYTES))
                status = await process.wait()
        except TimeoutError:
            raise self._failed(
                f"ansible-inventory did not end in {self._limit_s:g} s", "look at what its source waits for"
            ) from None
        finally:
            await _end(process)
        if status != 0:
            said = _last_error(complaint.result().decode(errors="replace"))
            raise self._failed(f"ansible-inventory ended with {status}: {said}", "correct the source")
        return output.result()

    def _read(self, output: bytes) -> Mapping[str, Any]:
        if len(output) >= OUTPUT_LIMIT_BYTES:
            raise self._failed(f"it is larger than {OUTPUT_LIMIT_BYTES} bytes", "split it into sources")
        try:
            listing = json.loads(output)
        except ValueError as error:
            raise self._failed(f"ansible-inventory printed no JSON ({error})", "run it by hand") from error
        if not isinstance(listing, dict):
            raise self._failed("ansible-inventory printed no object", "run it by hand")
        return listing

    def _found(self, name: str, variables: Mapping[str, Any], groups: Sequence[str]) -> Found:
        said = {label: variables.get(label) for label in self._labels}
        labels = {label: _text(value) for label, value in said.items() if value is not None}
        connection = {**variables, GROUPS: list(groups)}
        return Found(name=name, source=self.source, labels=labels, connection=connection)

    def _refused(self, mistakes: Sequence[_Mistake]) -> SourceFailed:
        """Return the error that names the first mistakes and counts the rest; each remedy is said once."""
        told = mistakes[:MOST_TOLD]
        more = f"; and {len(mistakes) - len(told)} more" if len(mistakes) > len(told) else ""
        found = "; ".join(f"variable {each.label} of host {each.name} is {each.kind}" for each in told)
        remedies = dict.fromkeys(each.remedy for each in told)
        return self._failed(f"{found}{more}; a label is one text", "; ".join(remedies))

    def _failed(self, happened: str, remedy: str) -> SourceFailed:
        return SourceFailed(f"inventory {self._path}: {happened}; {remedy}")


@dataclass(frozen=True, slots=True)
class _Mistake:
    """A host's variable that cannot be a label; says what it is, and what to do."""

    name: str
    label: str
    kind: str
    remedy: str


def _mistake(name: str, label: str, value: Any) -> _Mistake | None:
    """Return why the value is no label, None where it is one or where there is none."""
    match value:
        case str() if "{{" in value or "{%" in value:
            remedy = (
                "ansible-inventory renders no template: write the value, or let a dynamic inventory say it"
            )
            return _Mistake(name, label, f"a template ({value})", remedy)
        case None | bool() | str() | int() | float():
            return None
        case {"__ansible_vault": _}:
            remedy = (
                f"everybody reads labels: write {label} in plain text, or take it from the settings' labels"
            )
            return _Mistake(name, label, "a vaulted value", remedy)
        case _:
            kind = {"list": "a list", "dict": "a mapping"}.get(type(value).__name__, "no text")
            remedy = f"give each host one value for {label}, or take {label} from the labels in the settings"
            return _Mistake(name, label, kind, remedy)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


_ENVIRONMENT = {
    "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "1",
    "ANSIBLE_NOCOLOR": "1",
    "LC_ALL": "C.UTF-8",
}

_IMPLIED = frozenset({"all", "ungrouped"})


def _members(listing: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return each group's hosts, those of the groups below it included."""
    groups = {name: group for name, group in listing.items() if name != "_meta" and isinstance(group, dict)}

    def below(name: str, above: frozenset[str]) -> set[str]:
        group = groups.get(name, {})
        found = set(group.get("hosts", ()))
        for child in group.get("children", ()):
            if child not in above:
                found |= below(child, above | {child})
        return found

    return {name: below(name, frozenset({name})) for name in groups}


async def _read_some(stream: asyncio.StreamReader, limit: int) -> bytes:
    """Return at most so many bytes; what is beyond is the writer's problem."""
    kept = bytearray()
    while len(kept) < limit and (chunk := await stream.read(65536)):
        kept += chunk
    return bytes(kept[:limit])


async def _end(process: asyncio.subprocess.Process) -> None:
    """End ansible-inventory and the scripts that it started."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _last_error(complaint: str) -> str:
    """Return what ansible-inventory complained of, its plugins' guesses last."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("[ERROR]", "ERROR!"))]
    causes = [line for line in lines if line.startswith(("[WARNING]", "Origin:"))]
    return " ".join([*errors, *causes] or lines)[:COMPLAINT_LIMIT]
