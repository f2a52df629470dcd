"""Inventory source `ansible` through ansible-inventory.

By default ansible-inventory exits 0 with an empty fleet if it cannot parse a source, so it runs with an
option that makes it fail.  An empty fleet is an error too: it is far more often a broken source than
intended.  Templates stay unrendered: Ansible renders them in the run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rolloutd.adapters.command import run_command
from rolloutd.concurrency import threads
from rolloutd.errors import SourceFailed
from rolloutd.ports import GROUPS, IMPLICIT_GROUPS, AdapterContext, DiscoveredNode, plain_value, unsafe_text

MAX_OUTPUT_BYTES = 256 * 1024 * 1024
"""10,000 nodes with a hundred variables each are some 30 MiB of ansible-inventory's output."""

REFRESH_TIMEOUT_S = 120.0
"""A dynamic inventory reads a cloud page by page; a slower one is broken."""

VAULT_REMEDY = "name vault_password_file in the ansible.cfg of the daemon's user"

MAX_ERROR_LENGTH = 2000
"""Limit of ansible-inventory's output that an error quotes."""

MAX_SHOWN_ERRORS = 5
"""Invalid labels that an error names; one cause makes thousands, so the others are counted."""


def make(context: AdapterContext) -> AnsibleInventory:
    ansible_playbook = context.settings.ansible.bin
    binary = None if ansible_playbook is None else str(ansible_playbook.with_name("ansible-inventory"))
    return AnsibleInventory(Path(context.params["path"]), context.params["labels"], binary)


class AnsibleInventory:
    """The nodes of one Ansible inventory, each with its groups, those above them included and first."""

    gives_templates: ClassVar[bool] = True

    def __init__(
        self,
        path: Path,
        labels: Sequence[str] = (),
        binary: str | None = None,
        *,
        timeout_s: float = REFRESH_TIMEOUT_S,
    ) -> None:
        self._path = path
        self._labels = tuple(labels)
        self._binary = binary or str(Path(sys.executable).with_name("ansible-inventory"))
        self._timeout_s = timeout_s
        self.left_out: Mapping[str, str] = {}

    @property
    def source(self) -> str:
        return f"ansible:{self._path}"

    async def refresh(self) -> Sequence[DiscoveredNode]:
        if not self._path.exists():
            raise SourceFailed(f"there is no inventory {self._path}: name an existing file or directory")
        # In a thread: the listing of 10,000 nodes takes a third of a second.
        return await threads.RUNS.run(self.parse_nodes, await self._run_ansible_inventory())

    def parse_nodes(self, output: bytes) -> Sequence[DiscoveredNode]:
        """Return the nodes of ansible-inventory's listing; raises SourceFailed."""
        try:
            return self._parse_nodes(output)
        except (AttributeError, TypeError, RecursionError) as error:
            problem = f"ansible-inventory printed a listing of another shape ({error})"
            raise self._source_error(problem, "run it manually") from error

    def _parse_nodes(self, output: bytes) -> Sequence[DiscoveredNode]:
        listing = self._parse_listing(output)
        hosts = listing.get("_meta", {}).get("hostvars", {})
        members = _group_members(listing)
        names = sorted(set(hosts).union(*members.values()))
        if not all(isinstance(name, str) for name in names):
            raise TypeError("a host's name is not a text")
        if not names:
            raise self._source_error(
                "it names no host", "add hosts to it, or remove the source from the settings"
            )
        groups: dict[str, list[str]] = {}
        depths = _group_depths(listing)
        for group in sorted(members.keys() - IMPLICIT_GROUPS, key=lambda name: (depths.get(name, 1), name)):
            for name in members[group]:
                groups.setdefault(name, []).append(group)
        invalid = [
            problem
            for name in names
            for label in self._labels
            if (problem := _validate_label(name, label, hosts.get(name, {}).get(label))) is not None
        ]
        left_out = {each.name for each in invalid}
        if left_out == set(names):
            raise self._invalid_labels_error(invalid)
        self.left_out = {each.name: str(self._invalid_labels_error([each])) for each in invalid}
        valid = (name for name in names if name not in left_out)
        return [self._to_discovered_node(name, hosts.get(name, {}), groups.get(name, [])) for name in valid]

    async def _run_ansible_inventory(self) -> bytes:
        try:
            ended = await run_command(
                [self._binary, "--inventory", str(self._path.absolute()), "--list"],
                cwd=self._path.absolute().parent,
                environment={**os.environ, **_INVENTORY_ENVIRONMENT},
                timeout_s=self._timeout_s,
                max_output_bytes=MAX_OUTPUT_BYTES,
            )
        except TimeoutError:
            raise self._source_error(
                f"ansible-inventory did not end in {self._timeout_s:g} s", "check what its source waits for"
            ) from None
        except OSError as error:
            raise self._source_error(f"{self._binary}: {error.strerror}", "install ansible-core") from error
        if ended.status != 0:
            message = _last_error(ended.stderr.decode(errors="replace"))
            remedy = VAULT_REMEDY if "vault secrets" in message else "correct the source"
            raise self._source_error(
                f"ansible-inventory ended with {ended.status}: {message.rstrip('.')}", remedy
            )
        return ended.stdout

    def _parse_listing(self, output: bytes) -> Mapping[str, Any]:
        if len(output) >= MAX_OUTPUT_BYTES:
            raise self._source_error(f"it is larger than {MAX_OUTPUT_BYTES} bytes", "split it into sources")
        try:
            listing = json.loads(output)
        except ValueError as error:
            raise self._source_error(
                f"ansible-inventory did not print JSON ({error})", "run it manually"
            ) from error
        if not isinstance(listing, dict):
            raise self._source_error("ansible-inventory did not print an object", "run it manually")
        return listing

    def _to_discovered_node(
        self, name: str, variables: Mapping[str, Any], groups: Sequence[str]
    ) -> DiscoveredNode:
        values = {label: variables.get(label) for label in self._labels}
        labels = {label: _label_text(value) for label, value in values.items() if value is not None}
        connection = {**variables, GROUPS: list(groups)}
        return DiscoveredNode(name=name, source=self.source, labels=labels, connection=connection)

    def _invalid_labels_error(self, invalid: Sequence[_InvalidLabel]) -> SourceFailed:
        """Return the error that names the first invalid labels and each remedy once."""
        shown = invalid[:MAX_SHOWN_ERRORS]
        more = f"; and {len(invalid) - len(shown)} more" if len(invalid) > len(shown) else ""
        found = "; ".join(f"variable {each.label} of host {each.name} is {each.kind}" for each in shown)
        remedies = dict.fromkeys(each.remedy for each in shown)
        return self._source_error(f"{found}{more}; a label is one text", "; ".join(remedies))

    def _source_error(self, problem: str, remedy: str) -> SourceFailed:
        return SourceFailed(f"inventory {self._path}: {problem}; {remedy}")


@dataclass(frozen=True, slots=True)
class _InvalidLabel:
    """A host variable that cannot be a label, with its kind and remedy."""

    name: str
    label: str
    kind: str
    remedy: str


def _validate_label(name: str, label: str, value: Any) -> _InvalidLabel | None:
    """Return why the value is not a label; None if it is valid or absent."""
    if unsafe_text(value) is not None:
        return None
    match value:
        case str() if "{{" in value or "{%" in value:
            remedy = (
                "ansible-inventory renders no template: write the value, or let a dynamic inventory say it"
            )
            return _InvalidLabel(name, label, f"a template ({value})", remedy)
        case None | bool() | str() | int() | float():
            return None
        case {"__ansible_vault": _}:
            remedy = (
                f"all users read labels: write {label} in plain text, or take it from the settings' labels"
            )
            return _InvalidLabel(name, label, "a vaulted value", remedy)
        case _:
            kind = {"list": "a list", "dict": "a mapping"}.get(type(value).__name__, "no text")
            remedy = f"give each host one value for {label}, or take {label} from the labels in the settings"
            return _InvalidLabel(name, label, kind, remedy)


def _label_text(value: Any) -> str:
    value = plain_value(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


_INVENTORY_ENVIRONMENT = {
    "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "1",
    "ANSIBLE_NOCOLOR": "1",
    "LC_ALL": "C.UTF-8",
}


def _group_members(listing: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return each group's hosts, including those of its child groups."""
    groups = {name: group for name, group in listing.items() if name != "_meta" and isinstance(group, dict)}

    def below(name: str, above: frozenset[str]) -> set[str]:
        group = groups.get(name, {})
        found = set(group.get("hosts", ()))
        for child in group.get("children", ()):
            if child not in above:
                found |= below(child, above | {child})
        return found

    return {name: below(name, frozenset({name})) for name in groups}


def _group_depths(listing: Mapping[str, Any]) -> dict[str, int]:
    """Return how far each group is below `all`: variables of a deeper group take precedence."""
    depths: dict[str, int] = {}
    level = {"all"}
    for depth in range(len(listing) + 1):  # a loop among groups is an error of Ansible's own
        depths.update(dict.fromkeys(level, depth))
        level = {child for name in level for child in listing.get(name, {}).get("children", ())}
        if not level:
            break
    return depths


def _last_error(stderr: str) -> str:
    """Return ansible-inventory's errors, then its plugins' warnings."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("[ERROR]", "ERROR!"))]
    causes = [line for line in lines if line.startswith(("[WARNING]", "Origin:"))]
    return " ".join([*errors, *causes] or lines)[:MAX_ERROR_LENGTH]
