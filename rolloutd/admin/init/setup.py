"""The settings that init proposes, step by step: each step tests what it adds.

It changes no file; the caller writes the text that it ends with.
"""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from machines.model.node import natural_sort_key
from rolloutd.admin.disk import CheckResult
from rolloutd.admin.init import discovery, proposal
from rolloutd.admin.init.discovery import Candidate, Machine
from rolloutd.admin.init.options import Dialog, Options, absolute, split_option
from rolloutd.admin.init.settings_edit import APPEND, CannotEdit, Change, apply_changes
from rolloutd.admin.program import UsageError
from rolloutd.admin.systems import SourceReading, check_balancers, open_systems, read_sources
from rolloutd.engine.background.inventory_merge import MergedInventory, merge_inventories
from rolloutd.service.preflight import check_file
from rolloutd.settings import Settings, load
from rolloutd.texts.formats import join_limited, pluralize

JSON = Any

HEADER = """\
# Settings of rolloutd, written by `rolloutctl init`.  docs/settings.md has every key.
# Files in config.d/ are merged over it.  After a change: systemctl reload rolloutd.
"""

MAX_SHOWN = 40
"""Characters shown of a value that may have any length."""

DEFAULT_USER = "rolloutd"
"""User on the nodes where neither inventory nor ssh configuration names one."""

PERSONAL_REASON = (
    "it is yours, and the daemon runs as a user of its own; make a file for the daemon "
    "(docs/kubernetes.md, docs/netbox.md), then name it"
)


@dataclass(frozen=True, slots=True)
class NotTaken:
    """Something that was found and is not in the settings, with the option that adds it."""

    text: str
    reason: str
    option: str


@dataclass(slots=True)
class Setup:
    """The settings file as it was and as it shall be, with what was tested on the way."""

    options: Options
    machine: Machine
    dialog: Dialog
    report: Callable[[CheckResult], None]
    path: Path
    before: str = ""
    text: str = ""
    changes: list[Change] = field(default_factory=list)
    not_taken: list[NotTaken] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: list[CheckResult] = field(default_factory=list)
    """Checks of what the options name: nothing is written with one of them."""

    @classmethod
    def start(
        cls,
        options: Options,
        machine: Machine,
        dialog: Dialog,
        report: Callable[[CheckResult], None],
        path: Path,
    ) -> Setup:
        """Read the settings file if there is one; raises InvalidFile."""
        try:
            before = path.read_text(encoding="utf-8") if path.exists() else ""
        except UnicodeDecodeError as error:
            raise CannotEdit(f"{path}: it is not UTF-8; correct it, or move it away") from error
        setup = cls(options, machine, dialog, report, path, before, before or HEADER)
        setup.settings()
        return setup

    def settings(self) -> Settings:
        """Return the settings as they are now; raises InvalidFile."""
        try:
            is_empty = yaml.safe_load(self.text) is None and not self._later_files()
        except yaml.YAMLError:
            is_empty = False  # load() names the mistake with its line
        return Settings() if is_empty else load(self.path, self.text.encode())

    def _later_files(self) -> list[Path]:
        """Return the files that are merged over the settings file."""
        return sorted(self.path.parent.glob("config.d/*.yaml"))

    def change(self, change: Change) -> None:
        """Change the text; raises CannotEdit where another file has the last word."""
        for file in self._later_files():
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
            other = content.get(change.path[0]) if isinstance(content, dict) else None
            is_mapping = isinstance(other, dict) and len(change.path) > 1 and change.path[1] not in other
            if other is not None and not is_mapping:
                raise CannotEdit(f"{change.key}: {file} sets it too; change it there")
        edited = apply_changes(self.text, [change])
        if edited != self.text:
            self.text = edited
            self.changes.append(change)

    def name_of(self, path: str) -> str:
        """Return a path as the settings have it: relative where it is in their directory."""
        whole = Path(absolute(path))
        return (
            str(whole.relative_to(self.path.parent)) if whole.is_relative_to(self.path.parent) else str(whole)
        )

    def has(self, *keys: str) -> bool:
        """Return whether the file, or one that is merged over it, has a key."""
        texts = (self.text, *(file.read_text(encoding="utf-8") for file in self._later_files()))
        return any(_has_key(yaml.safe_load(text), keys) for text in texts)


def _has_key(content: JSON, keys: Sequence[str]) -> bool:
    for key in keys:
        if not isinstance(content, dict) or key not in content:
            return False
        content = content[key]
    return True


async def propose_settings(setup: Setup) -> MergedInventory:
    """Take every step; return the nodes that the sources of the new settings report."""
    is_first = not setup.settings().inventory
    _change_paths(setup)
    _choose_observe_only(setup, is_first=is_first)
    await _choose_sources(setup, is_first=is_first)
    await _choose_balancers(setup, is_first=is_first)
    merged = await _read_nodes(setup)
    await _choose_ssh(setup, merged, is_first=is_first)
    _choose_pools(setup, merged, is_first=is_first)
    _choose_teams(setup, merged, is_first=is_first)
    return merged


def _change_paths(setup: Setup) -> None:
    for key, text in (("state_dir", setup.options.state_dir), ("socket", setup.options.socket)):
        if text is not None:
            setup.change(Change((key,), setup.name_of(text), "As init was asked."))


def _choose_observe_only(setup: Setup, *, is_first: bool) -> None:
    asked = setup.options.observe_only
    if asked is not None:
        setup.change(Change(("observe_only",), asked == "on", "As init was asked."))
    elif is_first and not setup.has("observe_only"):
        question = "Only observe at first: decide and explain everything, do nothing?"
        reason = "For the first month: decide and explain everything, do nothing.  Then: false."
        setup.change(Change(("observe_only",), setup.dialog.confirm(question, proposed=True), reason))


# -- inventory sources -----------------------------------------------------------


async def _choose_sources(setup: Setup, *, is_first: bool) -> None:
    directory = setup.path.parent
    for candidate in _asked_sources(setup.options):
        await _add_source(setup, candidate, is_asked=True)
    _add_labels(setup)
    if setup.options.no_search:
        return
    inventories = discovery.find_inventories(setup.machine, directory)
    clusters = discovery.find_clusters(setup.machine, directory)
    netbox = discovery.find_netbox(setup.machine, directory)
    # One of several is a guess; all of them may be the same hosts under other names.
    is_ambiguous = len(inventories) > 1 or bool(setup.options.inventory)
    for candidate in (*inventories, *clusters, *netbox):
        if _is_present(setup, candidate):
            continue
        if candidate.problem:
            setup.not_taken.append(NotTaken(candidate.text, candidate.problem, _option_of(candidate)))
            continue
        if candidate.is_personal:
            reason = PERSONAL_REASON
        elif candidate.kind == "ansible" and is_ambiguous:
            reason = "several inventories are here, or another is named; name each that counts"
        else:
            reason = "" if is_first else "init changes only what it is asked to"
        question = f"Take {candidate.kind} {candidate.text} ({candidate.origin})?"
        if setup.dialog.confirm(question, proposed=not reason):
            await _add_source(setup, candidate, is_asked=False)
        else:
            setup.not_taken.append(NotTaken(candidate.text, reason or "declined", _option_of(candidate)))


def _asked_sources(options: Options) -> list[Candidate]:
    origin = "asked for"
    candidates = [Candidate("ansible", {"path": absolute(path)}, origin) for path in options.inventory]
    for text in options.kubeconfig:
        # FILE, or NAME=FILE where the file's own name does not name the cluster.
        name, equals, file = text.partition("=")
        path = Path(absolute(file if equals else text))
        params = {"name": name if equals else discovery.short_name(path.stem), "kubeconfig": str(path)}
        candidates.append(Candidate("kubernetes", params, origin, name=params["name"]))
    if options.netbox is not None:
        if options.netbox_token_file is None:
            raise UsageError(
                "--netbox: it needs --netbox-token-file; write the token into a file of mode 0640"
            )
        params = {"url": options.netbox, "token_file": absolute(options.netbox_token_file)}
        candidates.append(Candidate("netbox", params, origin))
    return candidates


def _option_of(candidate: Candidate) -> str:
    match candidate.kind:
        case "ansible":
            return f"--inventory {candidate.params['path']}"
        case "kubernetes":
            return f"--kubeconfig {candidate.name}=FILE"
        case _:
            return f"--netbox {candidate.params['url']} --netbox-token-file FILE"


def _is_present(setup: Setup, candidate: Candidate) -> bool:
    keys = {"ansible": ("path",), "kubernetes": ("kubeconfig",), "netbox": ("url",)}[candidate.kind]
    return any(
        source.kind == candidate.kind
        and all(str(source.params.get(key)) == str(candidate.params.get(key)) for key in keys)
        for source in setup.settings().inventory
    )


async def _add_source(setup: Setup, candidate: Candidate, *, is_asked: bool) -> None:
    """Test a source and add it with the labels that its nodes have."""
    if _is_present(setup, candidate):
        return
    problem = _find_open_secret(candidate)
    reading = SourceReading(problem) if problem else await _read_alone(setup, candidate, candidate.params)
    failed = [check for check in (reading.check, *reading.rights) if not check.ok]
    for check in (reading.check, *reading.rights):
        setup.report(check)
    if failed and is_asked:
        setup.failed += failed
        return
    if failed:
        setup.not_taken.append(NotTaken(candidate.text, failed[0].text, _option_of(candidate)))
        return
    params = {
        key: setup.name_of(value) if key in _PATH_KEYS else value for key, value in candidate.params.items()
    }
    count = pluralize(len(reading.nodes), "node")
    reason = f"{candidate.kind} {candidate.text}, {candidate.origin}: {count}."
    if candidate.kind == "ansible":
        params["labels"], said = _choose_labels(setup, reading)
        reason += f" {said}"
    elif candidate.kind == "kubernetes":
        params["labels"] = proposal.choose_cluster_labels(node.labels for node in reading.nodes)
    setup.change(proposal.source_change(candidate.kind, params, reason))


_PATH_KEYS = frozenset({"path", "kubeconfig", "token_file"})


def _find_open_secret(candidate: Candidate) -> CheckResult | None:
    for key in ("token_file", "kubeconfig"):
        if key in candidate.params:
            consequence = "NetBox cannot be read" if key == "token_file" else "the cluster cannot be read"
            for missing in check_file(key, Path(candidate.params[key]), consequence, secret=True):
                return CheckResult(f"{candidate.kind} {candidate.text}", False, missing.text)
    return None


async def _read_alone(setup: Setup, candidate: Candidate, params: Mapping[str, JSON]) -> SourceReading:
    given = {**params, "labels": []} if candidate.kind == "ansible" else params
    text = apply_changes(setup.text, [proposal.source_change(candidate.kind, given, "")])
    settings = load(setup.path, text.encode())
    settings = settings.model_copy(update={"inventory": settings.inventory[-1:]})
    async with open_systems(settings) as systems:
        [reading] = await read_sources(systems)
    return reading


def _choose_labels(setup: Setup, reading: SourceReading) -> tuple[list[str], str]:
    """Return the labels of an Ansible inventory, and why."""
    hosts = [node.connection for node in reading.nodes]
    if setup.options.label:
        return list(setup.options.label), "Labels as init was asked."
    usual, others = proposal.choose_labels(hosts), proposal.other_labels(hosts)
    chosen = setup.dialog.words("Host variables that become labels", usual)
    left = [name for name in others if name not in chosen]
    said = "Labels are the host variables by which teams, pools and plans choose nodes."
    if left:
        said += f" Others could be too: {join_limited(left, proposal.MAX_NAMED)}."
    if proposal.TEAM not in chosen:
        said += " No host has the variable team: write `team: NAME` under each team's group."
    return chosen, said


def _add_labels(setup: Setup) -> None:
    """Add the labels that the options name to the Ansible inventories that are there."""
    for number, source in enumerate(setup.settings().inventory):
        if source.kind == "ansible" and setup.options.label:
            labels = list(dict.fromkeys((*source.params["labels"], *setup.options.label)))
            setup.change(
                Change(("inventory", str(number), "ansible", "labels"), labels, "As init was asked.")
            )


# -- balancers -------------------------------------------------------------------


async def _choose_balancers(setup: Setup, *, is_first: bool) -> None:
    for text in setup.options.haproxy:
        name, address = split_option("--haproxy", text)
        params = {"socket": address} if address.startswith("/") else {"tcp": address}
        await _add_balancer(setup, Candidate("haproxy", params, "asked for", name=name), is_asked=True)
    if setup.options.no_search:
        return
    for candidate in discovery.find_balancers(setup.machine):
        section = setup.settings().section("haproxy")
        if any(params.model_dump(exclude_none=True) == candidate.params for params in section.values()):
            continue
        question = f"Take HAProxy {candidate.text} ({candidate.origin}) as balancer {candidate.name}?"
        if candidate.name not in section and setup.dialog.confirm(question, proposed=is_first):
            await _add_balancer(setup, candidate, is_asked=False)
        else:
            reason = "init changes only what it is asked to"
            option = f"--haproxy {candidate.name}={candidate.text}"
            setup.not_taken.append(NotTaken(candidate.text, reason, option))


async def _add_balancer(setup: Setup, candidate: Candidate, *, is_asked: bool) -> None:
    reason = f"HAProxy {candidate.text}, {candidate.origin}; plans isolate servers behind it."
    change = Change(("haproxy", candidate.name), dict(candidate.params), reason)
    settings = load(setup.path, apply_changes(setup.text, [change]).encode())
    async with open_systems(settings) as systems:
        results = await check_balancers(systems)
    [check] = [result for result in results if result.subject == f"haproxy {candidate.name}"]
    setup.report(check)
    if check.ok:
        setup.change(change)
    elif is_asked:
        setup.failed.append(check)
    else:
        option = f"--haproxy {candidate.name}={candidate.text}"
        setup.not_taken.append(NotTaken(candidate.text, check.text, option))


# -- nodes, ssh, pools and teams -------------------------------------------------


async def _read_nodes(setup: Setup) -> MergedInventory:
    """Return the nodes of all sources; one that fails is reported."""
    async with open_systems(setup.settings()) as systems:
        readings = await read_sources(systems)
    for reading in readings:
        if not reading.check.ok:
            setup.report(reading.check)
    return merge_inventories(node for reading in readings for node in reading.nodes)


async def _choose_ssh(setup: Setup, merged: MergedInventory, *, is_first: bool) -> None:
    options, directory = setup.options, setup.path.parent
    ordered = sorted(merged.nodes, key=natural_sort_key)
    hosts = [merged.connections[name] for name in ordered]
    targets = [str(host.get("ansible_host") or name) for name, host in zip(ordered, hosts, strict=True)]
    views = [] if options.no_search else discovery.read_ssh_views(setup.machine, targets)
    if options.known_hosts is not None:
        setup.change(Change(("ssh", "known_hosts"), setup.name_of(options.known_hosts), "As init was asked."))
    elif is_first and not setup.has("ssh", "known_hosts"):
        reason = "Only these host keys are accepted; `rolloutctl hosts scan` collects them."
        setup.change(Change(("ssh", "known_hosts"), "known_hosts", reason))
    if options.ssh_user is not None:
        setup.change(Change(("ssh", "user"), options.ssh_user, "As init was asked."))
    elif (
        is_first and not setup.has("ssh", "user") and not _all_have(hosts, "ansible_user", "ansible_ssh_user")
    ):
        user, reason = _propose_user(views)
        user = setup.dialog.text("User on the nodes", user)
        setup.change(Change(("ssh", "user"), user, reason))
    key_variables = ("ansible_ssh_private_key_file", "ansible_private_key_file")
    if options.ssh_key is not None:
        setup.change(Change(("ssh", "key_file"), setup.name_of(options.ssh_key), "As init was asked."))
    elif is_first and not setup.has("ssh", "key_file") and not _all_have(hosts, *key_variables):
        key = directory / "id_ed25519"
        reason = "The daemon's own key; yours in ~/.ssh and in the agent end with your session."
        reason += "" if key.exists() else "  init makes it."
        text = setup.dialog.text("Private key of the daemon (made if it does not exist)", str(key))
        setup.change(Change(("ssh", "key_file"), setup.name_of(text), reason))
    setup.notes += discovery.describe_ssh_views(views, len(targets))
    if keys := discovery.count_agent_keys(setup.machine):
        text = f"ssh agent: it has {pluralize(keys, 'key')}, which a service cannot use"
        setup.notes.append(f"{text}; use them once, to run the playbook that prepares nodes")


def _all_have(hosts: Sequence[Mapping[str, JSON]], *names: str) -> bool:
    return bool(hosts) and all(any(host.get(name) for name in names) for host in hosts)


def _propose_user(views: Sequence[discovery.SshView]) -> tuple[str, str]:
    own = current_user()
    named = {view.user for view in views if view.user not in ("", own)}
    if len(named) == 1:
        return named.pop(), "Your ssh configuration logs in to these nodes as this user."
    return DEFAULT_USER, "A user of its own on the nodes; the playbook of init makes it."


def _choose_pools(setup: Setup, merged: MergedInventory, *, is_first: bool) -> None:
    for text in setup.options.pool:
        key, value = split_option("--pool", text)
        budget = int(value) if value.isdecimal() else value
        if setup.has("pools", key):
            setup.change(Change(("pools", key, "max_unavailable"), budget, "As init was asked."))
        else:
            setup.change(Change(("pools", key), {"max_unavailable": budget}, "As init was asked."))
    if not is_first:
        return
    for change in proposal.propose_pools({name: node.labels for name, node in merged.nodes.items()}):
        if setup.has(*change.path):
            continue
        key = change.path[1]
        if not setup.dialog.asks:
            setup.change(change)
            continue
        question = (
            f"{change.reason}\nNodes of one {key} down at once (a number or a percentage; - for no pool)"
        )
        answer = setup.dialog.text(question, str(change.value["max_unavailable"]))
        if answer != "-":
            budget = int(answer) if answer.isdecimal() else answer
            setup.change(Change(change.path, {"max_unavailable": budget}, change.reason))


def _choose_teams(setup: Setup, merged: MergedInventory, *, is_first: bool) -> None:
    for text in setup.options.team:
        name, value = split_option("--team", text)
        members = [word for word in value.split(",") if word]
        if setup.has("teams", name):
            for member in members:
                setup.change(Change(("teams", name, "members", APPEND), member, "As init was asked."))
        else:
            setup.change(Change(("teams", name), {"members": members}, "As init was asked."))
    if not is_first:
        return
    labels = {name: node.labels for name, node in merged.nodes.items()}
    if invalid := proposal.invalid_team_names(labels.values()):
        names = join_limited([repr(name[:MAX_SHOWN]) for name in invalid], proposal.MAX_NAMED)
        advice = "use letters, digits, '-', '_' and '.' in the inventory, at most 63"
        setup.notes.append(f"label team: {names} cannot be the name of a team; {advice}")
    has_voters = any(team.members for team in setup.settings().teams.values())
    owner = None if has_voters else current_user()
    for change in proposal.propose_teams(labels, _has_group, owner):
        if setup.has(*change.path):
            continue
        question = f"{change.reason}\nMembers of team {change.path[1]}"
        members = setup.dialog.words(question, change.value["members"])
        setup.change(Change(change.path, {"members": members}, change.reason))


def _has_group(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def current_user() -> str:
    """Return the user who runs init, also under sudo."""
    uid = os.environ.get("SUDO_UID", "")
    try:
        return pwd.getpwuid(int(uid) if uid.isdecimal() else os.getuid()).pw_name
    except KeyError:
        return "root"
