"""The command hosts scan: compare the keys with second sources, and store what is approved."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machines.model.node import natural_sort_key
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.admin.host_keys import known_hosts
from rolloutd.admin.host_keys.evidence import SecondSources
from rolloutd.admin.host_keys.known_hosts import KeyChange
from rolloutd.admin.host_keys.scan import JudgedKey, KeyState, ScannedNode, Scanner, known_hosts_path
from rolloutd.admin.program import (
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_USAGE,
    ProgramOptions,
    UsageError,
    replace_file,
    write_stderr,
)
from rolloutd.admin.systems import open_systems, read_sources
from rolloutd.cli.output import Columns, print_list
from rolloutd.control.client import ApiError, Client, DaemonUnreachable, api_path
from rolloutd.engine.background.inventory_merge import merge_inventories
from rolloutd.errors import RolloutdError
from rolloutd.ports import HOST_KEY, ConnectionDefaults, Host
from rolloutd.settings import DEFAULT_CONFIG, Settings, load
from rolloutd.texts.formats import pluralize, suggest_name

JSON = Any

FILE_MODE = 0o644
"""Host keys are public; the daemon's user must read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(ProgramOptions):
    nodes: Sequence[str] = ()
    known: Sequence[str] = ()
    console: Sequence[str] = ()
    sshfp: Sequence[str] = ()
    replace: Sequence[str] = ()
    unconfirmed: bool = False
    reason: str | None = None

    @property
    def sources(self) -> SecondSources:
        return SecondSources(
            *([Path(path) for path in paths] for paths in (self.known, self.console, self.sshfp))
        )


def main(argv: Sequence[str] | None = None) -> int:
    options = Options.parse((sys.argv[1:] if argv is None else argv)[0])
    config = Path(options.config) if options.config else (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)
    try:
        if options.yes and not options.reason:
            raise UsageError("rolloutctl hosts scan: --yes needs --reason, which the audit keeps; give one")
        settings = load(config)
        defaults = ConnectionDefaults(settings.ssh.known_hosts, settings.ssh.user, settings.ssh.key_file)
        scanned = asyncio.run(_scan(options, settings, defaults))
        return _Approval(options, settings, known_hosts_path(defaults), scanned).run()
    except UsageError as error:
        write_stderr(str(error))
        return EXIT_USAGE
    except (RolloutdError, ApiError) as error:
        write_stderr(str(error))
    except OSError as error:
        write_stderr(f"{error.filename}: {error.strerror}; run this as the owner of the file")
    return EXIT_REFUSED


async def _scan(options: Options, settings: Settings, defaults: ConnectionDefaults) -> list[ScannedNode]:
    async with open_systems(settings) as systems:
        readings = await read_sources(systems)
        for reading in readings:
            if not reading.check.ok:
                write_stderr(reading.check.line)
        merged = merge_inventories(node for reading in readings for node in reading.nodes)
        names = list(options.nodes) or sorted(merged.nodes, key=natural_sort_key)
        if not names:
            raise UsageError("rolloutctl hosts scan: the settings name no node; add an inventory to them")
        for name in (*names, *options.replace):
            if name not in merged.nodes:
                advice = suggest_name(name, merged.nodes, "rolloutctl inventory lists them")
                raise UsageError(f"{name}: no such node; {advice}")
        # A label too, because NetBox's fields become labels.
        labels = {name: merged.nodes[name].labels for name in names}
        own_keys = {name: {HOST_KEY: each[HOST_KEY]} for name, each in labels.items() if HOST_KEY in each}
        hosts = [
            Host(name, connection={**own_keys.get(name, {}), **merged.connections[name]}) for name in names
        ]
        assert isinstance(systems.shell, SshShell)
        return await Scanner(systems.shell, defaults, options.sources).scan(hosts)


class _Approval:
    """What is shown of a scan, asked about, and stored."""

    def __init__(
        self, options: Options, settings: Settings, path: Path, scanned: Sequence[ScannedNode]
    ) -> None:
        self._options = options
        self._settings = settings
        self._path = path
        self._scanned = scanned
        self._asks = sys.stdin.isatty() and sys.stderr.isatty() and not options.yes

    def run(self) -> int:
        if not self._options.json:
            self._print()
        changes = self._approved_changes()
        stored = self._store(changes) if changes else []
        left = [node for node in self._scanned if node.problem or self._unstored(node, stored)]
        if self._options.json:
            nodes = [node.to_json() for node in self._scanned]
            answer = {"known_hosts": str(self._path), "nodes": nodes, "stored": [c.node for c in stored]}
            sys.stdout.write(json.dumps(answer, indent=2) + "\n")
        if stored:
            write_stderr(f"{self._path}: keys of {pluralize(len(stored), 'node')} stored")
        if left:
            write_stderr(f"{pluralize(len(left), 'node')} without a trusted key, such as {left[0].node}")
        return EXIT_REFUSED if left else EXIT_OK

    def _print(self) -> None:
        rows = [(node, key) for node in self._scanned for key in node.keys]
        print_list(_COLUMNS, rows)
        for node in self._scanned:
            if node.problem:
                write_stderr(node.problem)
        for node, key in rows:
            if key.replaces:
                old = ", ".join(each.fingerprint for each in key.replaces)
                advice = "this may be an attack; if the node was reinstalled, add --replace"
                write_stderr(f"{node.node}: {key.key.key_type} was {old}; {advice} {node.node}")

    def _approved_changes(self) -> list[KeyChange]:
        by_state = {state: self._count(state) for state in KeyState}
        stores_confirmed = self._agrees(
            f"Store {by_state[KeyState.CONFIRMED]} confirmed keys?", KeyState.CONFIRMED
        )
        question = f"Store {by_state[KeyState.UNCONFIRMED]} keys that no second source confirms?"
        stores_others = (self._options.yes and self._options.unconfirmed) or (
            self._asks and self._agrees(question, KeyState.UNCONFIRMED)
        )
        wanted = {KeyState.CONFIRMED} if stores_confirmed else set()
        wanted |= {KeyState.UNCONFIRMED} if stores_others else set()
        may_replace = self._options.yes or self._asks
        changes = []
        for node in self._scanned:
            # A node with a doubtful key is doubtful as a whole.
            is_doubtful = any(key.state in (KeyState.CHANGED, KeyState.CONTRADICTED) for key in node.keys)
            replaces = may_replace and node.node in self._options.replace and not _is_contradicted(node)
            chosen = [key for key in node.keys if key.state in wanted and (not is_doubtful or replaces)]
            if replaces:
                chosen += [key for key in node.keys if key.state is KeyState.CHANGED]
            if chosen:
                changes.append(_change_of(node, chosen))
        return changes

    def _count(self, state: KeyState) -> int:
        return sum(key.state is state for node in self._scanned for key in node.keys)

    def _agrees(self, question: str, state: KeyState) -> bool:
        if not self._asks:
            return self._options.yes
        return bool(self._count(state)) and _ask(f"{question} [y/N] ").lower() in ("y", "yes")

    def _store(self, changes: Sequence[KeyChange]) -> list[KeyChange]:
        """Have each change audited, then write the file; without a daemon print the lines."""
        before = (
            self._path.read_text(encoding="utf-8", errors="surrogateescape") if self._path.exists() else ""
        )
        known_hosts.apply(before, changes)  # a line that cannot be replaced is an error before the audit
        if not os.access(self._path.parent, os.W_OK):
            raise PermissionError(13, "permission denied", str(self._path.parent))
        reason = self._options.reason or (_ask("Reason, kept in the audit: ") if self._asks else "")
        if not reason:
            raise UsageError("rolloutctl hosts scan: the audit needs a reason; give --reason")
        client, audited = Client(self._settings.socket), list[KeyChange]()
        try:
            for change in changes:
                body = {
                    "reason": reason,
                    "stored": [key.text for key in change.stored],
                    "replaced": [key.text for key in change.replaced],
                    "confirmed_by": list(change.confirmed_by),
                }
                client.post(api_path("inventory", change.node, "host-keys"), body)
                audited.append(change)
        except DaemonUnreachable as error:
            lines = known_hosts.apply("", [change for change in changes if not change.replaced])
            write_stderr(
                f"{error}\nnothing was stored: start the daemon, which audits each key, or add these:"
            )
            write_stderr(lines.rstrip())
        except ApiError as error:
            write_stderr(f"{error}; the keys of nodes from {changes[len(audited)].node} on are not stored")
        if audited:  # exactly what has an entry
            replace_file(self._path, known_hosts.apply(before, audited), FILE_MODE)
        return audited

    def _unstored(self, node: ScannedNode, stored: Sequence[KeyChange]) -> bool:
        if any(change.node == node.node for change in stored):
            return False
        return not any(key.state in (KeyState.STORED, KeyState.CERTIFIED) for key in node.keys) or any(
            key.state in (KeyState.CHANGED, KeyState.CONTRADICTED) for key in node.keys
        )


def _is_contradicted(node: ScannedNode) -> bool:
    return any(key.contradicted_by for key in node.keys)


def _change_of(node: ScannedNode, keys: Sequence[JudgedKey]) -> KeyChange:
    return KeyChange(
        node.node,
        node.known_hosts_name,
        tuple(key.key for key in keys),
        tuple(dict.fromkeys(old for key in keys for old in key.replaces)),
        tuple(dict.fromkeys(source for key in keys for source in key.confirmed_by)),
    )


_COLUMNS: Columns = {
    "NODE": lambda row: row[0].node,
    "ADDRESS": lambda row: row[0].address,
    "TYPE": lambda row: row[1].key.key_type,
    "FINGERPRINT": lambda row: row[1].key.fingerprint,
    "STATE": lambda row: row[1].state.value,
    "SECOND SOURCES": lambda row: ", ".join(
        (*row[1].confirmed_by, *(f"NOT {source}" for source in row[1].contradicted_by))
    ),
}


def _ask(prompt: str) -> str:
    sys.stderr.write(prompt)
    sys.stderr.flush()
    return sys.stdin.readline().strip()


if __name__ == "__main__":
    sys.exit(main())
