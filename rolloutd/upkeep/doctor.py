"""Examines everything the daemon stands on; one finding each: it is well, or what to do.

The daemon need not run.  What root asks is asked as the daemon's user, because
what only root can read does not help the daemon; but the daemon itself is asked
by whoever came, because its socket is for people.  Nothing is changed, but that
a question at a service's socket starts the service, as every command's does.
"""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from machines.projection import Projection
from rolloutd.adapters.ansible.runner import AnsibleRunner
from rolloutd.adapters.kit import INVENTORIES, InventorySnapshot, Kit, make
from rolloutd.adapters.sources.trees import place_of
from rolloutd.adapters.ssh.pool import SshShell
from rolloutd.app import SystemClock
from rolloutd.compile import compile_limits
from rolloutd.control.client import Answer, Client, NoDaemon
from rolloutd.counting import count
from rolloutd.errors import InvalidFile, RolloutdError
from rolloutd.ports import Examined, Inventory, Pinned
from rolloutd.service.footing import lacks
from rolloutd.service.reloading import Compiler
from rolloutd.settings import Settings, load
from rolloutd.store import database, open_store
from rolloutd.upkeep.disk import is_current, ledger, state_dir
from rolloutd.upkeep.finding import Finding
from rolloutd.upkeep.soundness import faults

COMMAND_LIMIT_S = 60.0
"""How long a program may take to say its version; Ansible loads half of Python for it."""

ASK_LIMIT_S = 20.0
"""How long the daemon may take to answer: one that the question starts needs some seconds."""

MOST_FAULTS = 3
"""Faults that are told; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the daemon has told of itself, and of its sources unless it did not answer."""

    daemon: Finding
    sources: tuple[Finding, ...] | None


def settings_finding(config: Path | None) -> Finding:
    """Judge the settings' files."""
    try:
        settings = load(config)
    except InvalidFile as invalid:
        return Finding("settings", False, "; ".join(str(mistake) for mistake in invalid.mistakes))
    read = ", ".join(str(file) for file in settings.files) or "all default: there is no file"
    if not settings.inventory:
        return Finding("settings", False, f"{read}; no inventory is named, so there is no node to walk")
    return Finding("settings", True, read)


def ask_daemon(path: Path) -> Told:
    """Ask the daemon at this socket of itself and of its sources; blocks, some seconds at most."""
    client = Client(path, ASK_LIMIT_S)
    try:
        health, inventory = client.get("/v1/health"), client.get("/v1/inventory")
    except NoDaemon as none:
        return Told(_silence(path, none), None)
    except Answer as answer:
        return Told(Finding("daemon", False, f"{path} answers {answer.status}: {answer.body}"), None)
    trouble = health["trouble"]
    text = f"{health['version']}, pid {health['pid']}, epoch {health['epoch']}"
    sources = tuple(
        Finding(
            each["source"],
            not each["error"],
            each["error"] or f"{count(each['nodes'], 'node')}, as the daemon sees it",
        )
        for each in inventory["sources"]
    )
    return Told(Finding("daemon", not trouble, f"{text}: {trouble}" if trouble else text), sources)


def become_owner(state_dir: Path) -> None:
    """Become the owner of the state directory, if we are root and it is another account's."""
    if os.geteuid() != 0 or not state_dir.exists() or state_dir.stat().st_uid == 0:
        return
    found = state_dir.stat()
    try:
        account = pwd.getpwuid(found.st_uid)
    except KeyError:
        return  # nobody whom the daemon could run as; what follows is told of the directory
    os.initgroups(account.pw_name, found.st_gid)
    os.setgid(found.st_gid)
    os.setuid(found.st_uid)
    os.environ.update(HOME=account.pw_dir, USER=account.pw_name, LOGNAME=account.pw_name)


async def examine(settings: Settings, told: Told) -> list[Finding]:
    """Return what is found of everything but the settings' files, and what the daemon told."""
    findings = [*state_dir(settings.state_dir), *await asyncio.to_thread(lambda: list(_named(settings)))]
    path = settings.state_dir / database.FILE_NAME
    if os.access(settings.state_dir, os.R_OK | os.X_OK):
        found = await asyncio.to_thread(lambda: list(ledger(path)))
        findings += found
        if found[0].ok and await asyncio.to_thread(lambda: is_current(path)):
            findings.append(await _judged("invariants", lambda: _invariants(settings)))
            findings.append(await _judged("playbooks", lambda: _playbooks(settings)))
    findings.append(await _judged("people", lambda: asyncio.to_thread(_people, settings)))
    findings.append(await _judged("ansible", lambda: _ansible(settings)))
    findings.append(await _judged("ssh", lambda: _ssh(settings)))
    findings.append(told.daemon)
    async with aclosing(_sources(settings, told)) as asked:
        findings += [finding async for finding in asked]
    async with aclosing(_lacks(settings)) as lacking:
        findings += [finding async for finding in lacking]
    return findings


async def _judged(subject: str, judge: Callable[[], Awaitable[str]]) -> Finding:
    """Return the finding of something that says how it is, or raises what is wrong."""
    try:
        return Finding(subject, True, await judge())
    except RolloutdError as error:
        return Finding(subject, False, str(error))
    except OSError as error:
        return Finding(subject, False, f"{error.filename}: {error.strerror}")


def _named(settings: Settings) -> Iterator[Finding]:
    """Tell of what the settings name and is not there; people, ansible and ssh are judged by themselves."""
    for lack in lacks(settings):
        if not lack.where.startswith(("socket_group", "ansible.", "ssh.")):
            yield Finding(lack.where, False, lack.text)


class _Wrong(RolloutdError):
    """What is wrong, and what to do."""


async def _invariants(settings: Settings) -> str:
    compiler = Compiler(settings.teams)
    store = await open_store(settings.state_dir, compile=compiler, read_only=True)
    try:
        snapshot = await store.load()
    finally:
        await store.close()
    found = faults(Projection.build(snapshot, compile_limits(settings), compiler))
    if found:
        more = f"; and {len(found) - MOST_FAULTS} more" if len(found) > MOST_FAULTS else ""
        raise _Wrong(f"{'; '.join(found[:MOST_FAULTS])}{more}: pause the rollouts and look at these nodes")
    rollouts, targets = count(len(snapshot.rollouts), "live rollout"), count(len(snapshot.targets), "target")
    return f"no contradiction in {rollouts} with {targets}"


async def _playbooks(settings: Settings) -> str:
    """Look for the trees of live rollouts: a database that was restored elsewhere comes without them."""
    store = await open_store(settings.state_dir, compile=Compiler(settings.teams), read_only=True)
    try:
        live = [rollout.id for rollout in (await store.load()).rollouts if not rollout.closed]
        pins = {rollout: (await store.content(rollout))[1] for rollout in live}
    finally:
        await store.close()
    places = {
        rollout: place_of(settings.state_dir, Pinned(pin["kind"], pin["pin"]))
        for rollout, pin in pins.items()
    }
    lost = [rollout for rollout, place in places.items() if not await asyncio.to_thread(place.is_dir)]
    if lost:
        raise _Wrong(
            f"those of {', '.join(lost)} are not in {settings.state_dir}/trees: copy them from where the"
            " database comes from, or submit the same plans again, which go on where they are"
        )
    return f"those of {count(len(live), 'live rollout')} are kept"


# -- what is run --------------------------------------------------------------


def _people(settings: Settings) -> str:
    """Look for everybody whom the settings name: who is not there opens no gate, and nobody would be told."""
    named = {f"teams.{name}.members": team.members for name, team in settings.teams.items()}
    named["admins"] = settings.admins
    lost = [
        f"{where}: {member}"
        for where, members in named.items()
        for member in members
        if not _is_there(member)
    ]
    if settings.socket_group is not None and not _is_there(f"@{settings.socket_group}"):
        lost.append(f"socket_group: {settings.socket_group}")
    if lost:
        raise _Wrong(f"this machine does not know {', '.join(lost)}: make them, or change the settings")
    known = count(len({member for members in named.values() for member in members}), "name")
    return f"{known}, all known here"


def _is_there(member: str) -> bool:
    """Say whether a user, or an @group, is known to this machine's name service."""
    try:
        grp.getgrnam(member[1:]) if member.startswith("@") else pwd.getpwnam(member)
    except KeyError:
        return False
    return True


async def _ansible(settings: Settings) -> str:
    beside = Path(sys.executable).with_name("ansible-playbook")
    binary = str(settings.ansible.bin or beside)
    advice = "name ansible.bin in the settings, or install ansible-core beside rolloutd"
    return (await _version([binary, "--version"], advice)).splitlines()[0]


async def _ssh(settings: Settings) -> str:
    version = await _version(["ssh", "-V"], "install OpenSSH's client")
    for path, what in ((settings.ssh.known_hosts, "host keys"), (settings.ssh.key_file, "private key")):
        if path is None:
            continue
        if not path.is_file():
            raise _Wrong(
                f"there is no {path} ({what} of the settings): make it, or change ssh in the settings"
            )
        if not os.access(path, os.R_OK):
            raise _Wrong(f"{path} ({what}) cannot be read by the daemon's user: chgrp rolloutd, mode 0640")
    key = settings.ssh.key_file
    if key is not None and key.stat().st_uid == os.geteuid() and key.stat().st_mode & 0o077:
        raise _Wrong(f"{key} is open to others and ssh will not use it: chmod 600 {key}")
    return version.strip()


async def _version(command: Sequence[str], advice: str) -> str:
    """Return what a program says of itself; raises _Wrong."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as error:
        raise _Wrong(f"{command[0]} cannot be run ({error.strerror}): {advice}") from error
    try:
        async with asyncio.timeout(COMMAND_LIMIT_S):
            said, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise _Wrong(f"{command[0]} did not answer within {COMMAND_LIMIT_S:.0f} s: {advice}") from None
    text = said.decode(errors="replace").strip()
    if process.returncode or not text:
        last = text.splitlines()[-1][-300:] if text else "it said nothing"
        raise _Wrong(f"{command[0]} ended with {process.returncode} ({last}): {advice}")
    return text


# -- who answers --------------------------------------------------------------


def _silence(path: Path, none: NoDaemon) -> Finding:
    """Tell a daemon that is not there from one that does not answer, and from one that we may not ask."""
    match none.__cause__:
        case FileNotFoundError() | ConnectionRefusedError():
            return Finding("daemon", True, f"not running at {path} (systemctl start rolloutd)")
        case PermissionError():
            text = f"you may not ask at {path}: run this as root, or as somebody of the socket's group"
            return Finding("daemon", False, text)
    return Finding("daemon", False, f"{none}; `systemctl status rolloutd` and its journal say why")


async def _sources(settings: Settings, told: Told) -> AsyncGenerator[Finding, None]:
    """Tell what the daemon says of its sources; where it says nothing, ask the sources."""
    if told.sources is not None:
        for finding in told.sources:
            yield finding
        return
    async with _inventories(settings) as inventories:
        for inventory in inventories:
            yield await _source(inventory)


async def _lacks(settings: Settings) -> AsyncGenerator[Finding, None]:
    """Ask the sources that can say it what they lack, one finding each."""
    async with _inventories(settings) as inventories:
        for inventory in inventories:
            if isinstance(inventory, Examined):
                subject, lacks = f"{inventory.source} rights", await inventory.lacks()
                if not lacks:
                    yield Finding(subject, True, "all that are needed")
                for text in lacks:
                    yield Finding(subject, False, text)


@asynccontextmanager
async def _inventories(settings: Settings) -> AsyncIterator[list[Inventory | Finding]]:
    """Make the sources of the settings; one that cannot be made is a finding."""
    shell = SshShell(settings.ssh.known_hosts, settings.ssh.user, settings.ssh.key_file)
    with tempfile.TemporaryDirectory(prefix="rolloutd-") as place:
        runner = AnsibleRunner(Path(place), shell)
        kit = Kit(shell, SystemClock(), runner, lambda: InventorySnapshot({}), settings)
        made: list[Inventory | Finding] = []
        for source in settings.inventory:
            try:
                made.append(make(INVENTORIES, source.kind, replace(kit, params=source.params)))
            except RolloutdError as error:
                made.append(Finding(source.kind, False, str(error)))
        try:
            yield made
        finally:
            for system in kit.shared.values():
                await system.close()
            await shell.close()


async def _source(inventory: Inventory | Finding) -> Finding:
    if isinstance(inventory, Finding):
        return inventory
    try:
        found = await inventory.refresh()
    except RolloutdError as error:
        return Finding(inventory.source, False, str(error))
    return Finding(
        inventory.source, bool(found), count(len(found), "node") if found else "it names no node at all"
    )
