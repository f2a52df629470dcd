"""The command init: propose, show the difference, write, and say what comes next."""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import sys
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from machines.model.node import natural_sort_key
from rolloutd.admin.disk import CheckResult
from rolloutd.admin.doctor import check_accounts_and_programs, switch_to_owner
from rolloutd.admin.init import node_setup
from rolloutd.admin.init.discovery import Machine
from rolloutd.admin.init.node_setup import NodeSetup
from rolloutd.admin.init.offline_preview import preview_offline
from rolloutd.admin.init.options import Dialog, Options
from rolloutd.admin.init.setup import DEFAULT_USER, Setup, current_user, propose_settings
from rolloutd.admin.program import EXIT_OK, EXIT_REFUSED, EXIT_USAGE, UsageError, replace_file, write_stderr
from rolloutd.admin.systems import check_balancers, check_logins, open_systems, read_sources
from rolloutd.cli.plans import print_preview
from rolloutd.engine.background.inventory_merge import MergedInventory
from rolloutd.errors import InvalidFile, RolloutdError
from rolloutd.ports import Host
from rolloutd.settings import DEFAULT_CONFIG, Settings

JSON = Any

NEW_FILE_MODE = 0o644
"""The settings name secrets' files and contain no secret, so all users may read them."""

PREVIEWED_PLAN = "hello"

PLAYBOOK_NAME = "prepare-nodes.yml"

LOGINS_COME_LATER = "not tested without a key and host keys; take the steps below, then rolloutctl doctor"

MAX_TARGETS = 20
"""Nodes of the preview that are printed: one screen. --json has all."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    options = Options.parse(arguments[0])
    path = Path(options.config or DEFAULT_CONFIG).absolute()
    machine = Machine(os.environ, Path.home(), Path.cwd())
    try:
        return asyncio.run(_run(options, path, machine))
    except UsageError as error:
        write_stderr(str(error))
        return EXIT_USAGE
    except PermissionError as error:
        write_stderr(f"{error.filename}: {error.strerror}; run init as root, or name another --config")
    except RolloutdError as error:
        write_stderr(str(error))
    except OSError as error:
        write_stderr(f"{error.filename}: {error.strerror}; correct the path")
    return EXIT_REFUSED


class Report:
    """The checks in their order; as text each is printed at once."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.checks: list[CheckResult] = []

    def add(self, check: CheckResult) -> None:
        self.checks.append(check)
        if not self.as_json:
            _print_line(check.line)

    def heading(self, text: str) -> None:
        if not self.as_json:
            _print_line(f"\n{text}")

    def lines(self, lines: Sequence[str]) -> None:
        if not self.as_json:
            for line in lines:
                _print_line(f"  {line}")


async def _run(options: Options, path: Path, machine: Machine) -> int:
    report, dialog = Report(as_json=options.json), Dialog(options)
    setup = Setup.start(options, machine, dialog, report.add, path)
    merged = await propose_settings(setup)
    settings = setup.settings()
    _show_what_was_seen(setup, report)
    if setup.failed:
        problems = "; ".join(f"{check.subject}: {check.text}" for check in setup.failed)
        raise RolloutdError(f"nothing was written: {problems}")
    if not settings.inventory:
        problem = "no inventory was taken" if setup.not_taken else "no inventory is here"
        raise UsageError(
            f"rolloutctl init: {problem}, and nothing was written; name one with --inventory FILE"
        )
    _show_settings(setup, report)
    written = _write(setup, settings, dialog)
    nodes = _describe_nodes(settings, merged)
    playbook = _write_playbook(options, nodes, dialog)
    tests_logins = _has_files_for_logins(settings)
    # All is written; from here the rights of the daemon's user count.
    switch_to_owner(settings.state_dir)
    await _check_written(settings, merged, report, tests_logins=tests_logins)
    report.heading("On each node that rolloutd shall reach:")
    report.lines(nodes.lines())
    report.heading(f"The same as a playbook, {playbook or PLAYBOOK_NAME}:")
    report.lines(nodes.playbook().splitlines())
    preview, problem = _preview(settings, merged)
    report.heading(f"Preview of the plan {PREVIEWED_PLAN}, which changes nothing:")
    report.lines([problem] if problem else [])
    if preview is not None and not options.json:
        targets = preview["targets"]
        print_preview(preview | {"targets": targets[:MAX_TARGETS]})
        if len(targets) > MAX_TARGETS:
            _print_line(f"shown: the first {MAX_TARGETS} of {len(targets)} nodes (--json has all)")
    following = _next_steps(settings, written=written, is_dry=options.dry_run)
    report.heading("Next:")
    report.lines(following)
    if options.json:
        answer = {
            "settings": str(path),
            "written": written,
            "diff": _diff(setup),
            "choices": [{"key": c.key, "value": c.value, "reason": c.reason} for c in setup.changes],
            "not_taken": [{"what": n.text, "reason": n.reason, "option": n.option} for n in setup.not_taken],
            "notes": setup.notes,
            "checks": [check.to_json() for check in report.checks],
            "nodes": nodes.to_json(),
            "preview": preview,
            "preview_problem": problem,
            "next": following,
        }
        _print_line(json.dumps(answer, indent=2))
    return EXIT_OK


def _show_what_was_seen(setup: Setup, report: Report) -> None:
    if setup.not_taken:
        report.heading("Not taken:")
        report.lines([f"{item.text}: {item.reason} ({item.option})" for item in setup.not_taken])
    if setup.notes:
        report.heading("Note:")
        report.lines(setup.notes)


def _show_settings(setup: Setup, report: Report) -> None:
    difference = _diff(setup)
    report.heading(f"Settings {setup.path}:" if difference else f"Settings {setup.path}: nothing to change")
    if not report.as_json:
        sys.stdout.write(difference)
        sys.stdout.flush()


def _diff(setup: Setup) -> str:
    if not setup.changes:
        return ""
    lines = difflib.unified_diff(
        setup.before.splitlines(keepends=True),
        setup.text.splitlines(keepends=True),
        str(setup.path) if setup.before else "/dev/null",
        str(setup.path),
    )
    return "".join(lines)


def _write(setup: Setup, settings: Settings, dialog: Dialog) -> bool:
    """Write the settings, and the key that they name if it does not exist, if the user agrees."""
    key = settings.ssh.key_file
    makes_key = key is not None and not key.exists()
    if setup.options.dry_run or not (setup.changes or makes_key):
        return False
    question = f"Write {setup.path}" + (f" and make the key {key}?" if makes_key else "?")
    if not dialog.confirm(question, proposed=setup.options.yes):
        raise RolloutdError("rolloutctl init: declined; nothing was written")
    if makes_key and key is not None:
        node_setup.make_key(key, settings.state_dir)
    if setup.changes:
        replace_file(setup.path, setup.text, NEW_FILE_MODE)
    return True


def _has_files_for_logins(settings: Settings) -> bool:
    """Return whether the key and the host keys exist; they may be the inventory's own."""
    files = (settings.ssh.known_hosts, settings.ssh.key_file)
    return all(file is None or file.exists() for file in files)


async def _check_written(
    settings: Settings, merged: MergedInventory, report: Report, *, tests_logins: bool
) -> None:
    report.heading("Checks:")
    for check in await check_accounts_and_programs(settings):
        report.add(check)
    hosts = [Host(name, connection=merged.connections[name]) for name in _one_of_each_team(merged)]
    async with open_systems(settings, merged.connections) as systems:
        for reading in await read_sources(systems, nodes=False):
            for right in reading.rights:
                report.add(right)
        for check in await check_balancers(systems):
            report.add(check)
        if not tests_logins:  # each login would fail for the same reason
            report.add(CheckResult("logins", False, LOGINS_COME_LATER))
            return
        for check in await check_logins(systems.shell, hosts, settings.ansible.fence_dir):
            report.add(check)


def _one_of_each_team(merged: MergedInventory) -> list[str]:
    """Return the nodes' names, the first of each team before all others."""
    names = sorted(merged.nodes, key=natural_sort_key)
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(merged.nodes[name].labels.get("team", ""), name)
    return list(dict.fromkeys((*first.values(), *names)))


def _describe_nodes(settings: Settings, merged: MergedInventory) -> NodeSetup:
    """Return what nodes need for the login that settings and inventory agree on."""
    hosts = merged.connections.values()
    users = {str(host.get("ansible_user") or settings.ssh.user or DEFAULT_USER) for host in hosts}
    keys = {str(host.get("ansible_ssh_private_key_file") or settings.ssh.key_file or "") for host in hosts}
    user = settings.ssh.user or (users.pop() if len(users) == 1 else DEFAULT_USER)
    key = settings.ssh.key_file or (Path(keys.pop()) if len(keys) == 1 else None)
    try:
        public_key = node_setup.read_public_key(key) if key is not None and key.is_file() else ""
    except RolloutdError:
        public_key = ""  # the check of the login says what is wrong with the key
    own_keys = len(keys) + 1 if key is None and keys else 0
    return NodeSetup(user, public_key, settings.ansible.fence_dir, own_keys)


def _write_playbook(options: Options, nodes: NodeSetup, dialog: Dialog) -> Path | None:
    if options.nodes_playbook is None or options.dry_run:
        return None
    path, text = Path(options.nodes_playbook), nodes.playbook()
    is_other = path.exists() and path.read_text(encoding="utf-8") != text
    if is_other and not dialog.confirm(f"Replace {path}?", proposed=options.yes):
        return None
    path.write_text(text, encoding="utf-8")
    return path


def _preview(settings: Settings, merged: MergedInventory) -> tuple[JSON, str]:
    """Return the preview of the harmless plan, or why there is none."""
    reported = [node for nodes in merged.reports.values() for node in nodes]
    with resources.as_file(resources.files("rolloutd") / "examples" / PREVIEWED_PLAN) as directory:
        try:
            plan, tree = directory / "plan.yml", directory / "tree"
            return preview_offline(settings, reported, plan, tree, current_user(), time.time()), ""
        except InvalidFile as invalid:
            return None, "; ".join(str(mistake) for mistake in invalid.diagnostics)
        except RolloutdError as error:
            return None, str(error)


def _next_steps(settings: Settings, *, written: bool, is_dry: bool) -> list[str]:
    steps = ["rolloutctl init without --dry-run writes this"] if is_dry else []
    steps += [
        f"run {PLAYBOOK_NAME} over the inventory (--nodes-playbook FILE writes it)",
        "rolloutctl hosts scan: compare the nodes' host keys, and store them",
        "systemctl restart rolloutd" if written else "systemctl enable --now rolloutd",
        "rolloutctl doctor",
        f"rolloutctl plan new --like {PREVIEWED_PLAN}, then rolloutctl plan submit plan.yml",
    ]
    if settings.observe_only:
        steps.append("rolloutctl init --observe-only off, when it shall act")
    return steps


def _print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
