"""Checks of the daemon's dependencies; each result says what to do if it is wrong.

The daemon need not run.  As root, the doctor switches to the daemon's user for the checks, because the
daemon cannot use files that only root can read.  Before that it queries the daemon as the caller, because the
socket is for users.  It changes nothing, except that a request to an activated socket starts the service,
and that an object is written to a bucket of `files.s3` and removed.
"""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import re
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from machines.facts.index import Index
from machines.facts.projection import Projection
from machines.model.plan import PILOT_WAVE, GateName
from machines.model.rollout import Rollout, Target
from machines.states import IN_FLIGHT_PHASES, Phase
from rolloutd.adapters.directory_store import open_bucket
from rolloutd.adapters.sources.tree_store import TREES_DIRECTORY, tree_directory
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.admin.disk import CheckResult, check_database, check_state_dir
from rolloutd.admin.runs import describe_runs, suggest_pipelining
from rolloutd.admin.systems import check_balancers, check_runners, open_systems, read_sources
from rolloutd.concurrency import threads
from rolloutd.configuration.documents import load_redaction_key
from rolloutd.configuration.sealed_variables import unseal
from rolloutd.control.client import ApiError, Client, DaemonUnreachable
from rolloutd.errors import InvalidFile, RolloutdError
from rolloutd.ports import PinnedSource
from rolloutd.service.preflight import find_missing_prerequisites
from rolloutd.service.reload import TeamPlanCompiler
from rolloutd.settings import Settings, load
from rolloutd.settings.compile import compile_limits
from rolloutd.store import Store, open_store
from rolloutd.texts.formats import pluralize

COMMAND_TIMEOUT_S = 60.0
"""Time limit for a program to print its version: Ansible takes seconds."""

DAEMON_TIMEOUT_S = 20.0
"""Time limit for the daemon's answer: a daemon that the request starts needs some seconds."""

MAX_LISTED_VIOLATIONS = 3

UNITS = ("rolloutd.socket", "rolloutd.service")

QUERY_TIMEOUT_S = 10.0
"""Time limit for systemctl, which answers in milliseconds."""

STOPPED = "inactive"


@dataclass(frozen=True, slots=True)
class DaemonReport:
    """The daemon's report on itself, its sources and its runs; None without an answer."""

    daemon: CheckResult
    sources: tuple[CheckResult, ...] | None
    runs: CheckResult | None = None


def check_settings(config: Path | None) -> CheckResult:
    try:
        settings = load(config)
    except InvalidFile as invalid:
        return CheckResult("settings", False, "; ".join(str(mistake) for mistake in invalid.diagnostics))
    read = ", ".join(str(file) for file in settings.files) or "all defaults, no settings file"
    if not settings.inventory:
        problem = f"{read}: no inventory; run rolloutctl init, or name the settings with --config"
        return CheckResult("settings", False, problem)
    return CheckResult("settings", True, read)


def query_daemon(path: Path) -> DaemonReport:
    """Query the daemon at this socket for itself and its sources; blocks for some seconds at most."""
    client = Client(path, DAEMON_TIMEOUT_S)
    try:
        health, inventory = client.get("/v1/health"), client.get("/v1/inventory")
    except DaemonUnreachable as unreachable:
        return DaemonReport(_report_unreachable(path, unreachable), None)
    except ApiError as error:
        return DaemonReport(
            CheckResult("daemon", False, f"{path} answers {error.status}: {error.body}"), None
        )
    problem = health["trouble"]
    text = f"{health['version']}, pid {health['pid']}, epoch {health['epoch']}"
    sources = tuple(
        CheckResult(
            each["source"],
            not each["error"],
            each["error"] or f"{pluralize(each['nodes'], 'node')}, as the daemon sees it",
        )
        for each in inventory["sources"]
    )
    return DaemonReport(
        CheckResult("daemon", not problem, f"{text}: {problem}" if problem else text),
        sources,
        describe_runs(health["runs"]) if "runs" in health else None,  # an older daemon does not report them
    )


def switch_to_owner(state_dir: Path) -> None:
    """Become the owner of the state directory if we are root and another account owns it."""
    if os.geteuid() != 0 or not state_dir.exists() or state_dir.stat().st_uid == 0:
        return
    found = state_dir.stat()
    try:
        account = pwd.getpwuid(found.st_uid)
    except KeyError:
        return  # no such account; check_state_dir() reports it
    # The groups first: after setuid() the process may not change them.
    os.initgroups(account.pw_name, found.st_gid)
    os.setgid(found.st_gid)
    os.setuid(found.st_uid)
    os.environ.update(HOME=account.pw_dir, USER=account.pw_name, LOGNAME=account.pw_name)


async def run_checks(settings: Settings, report: DaemonReport) -> list[CheckResult]:
    """Return the results of all checks except check_settings()."""
    results = [
        *check_state_dir(settings.state_dir),
        *await threads.FILES.run(lambda: list(_check_prerequisites(settings))),
    ]
    if os.access(settings.state_dir, os.R_OK | os.X_OK):
        found, is_loadable = await threads.FILES.run(
            check_database, settings.state_dir, settings.store.postgresql, settings.redaction_key_file
        )
        results += found
        if is_loadable:
            results += await _check_content(settings)
    if settings.shared_files.is_named:
        results.append(await _run_check("files", lambda: _check_files(settings)))
    results += await check_accounts_and_programs(settings)
    results.append(report.daemon)
    results += [] if report.runs is None else [report.runs]
    async with open_systems(settings) as systems:
        # A running daemon reads the sources itself, so they are not read twice.
        readings = await read_sources(systems, nodes=report.sources is None)
        results += [reading.check for reading in readings] if report.sources is None else report.sources
        results += [right for reading in readings for right in reading.rights]
        results += await check_balancers(systems)
        results += await check_runners(systems)
    return results


async def check_accounts_and_programs(settings: Settings) -> list[CheckResult]:
    """Check the people of the settings, Ansible, and ssh with its files."""
    return [
        await _run_check("people", lambda: threads.ACCOUNTS.run(_check_accounts, settings)),
        await _run_check("ansible", lambda: _check_ansible(settings)),
        await _run_check("ssh", lambda: _check_ssh(settings)),
    ]


async def _run_check(subject: str, check: Callable[[], Awaitable[str]]) -> CheckResult:
    """Return the result of a check that returns a text, or raises when something is wrong."""
    try:
        return CheckResult(subject, True, await check())
    except RolloutdError as error:
        return CheckResult(subject, False, str(error))
    except OSError as error:
        return CheckResult(subject, False, f"{error.filename}: {error.strerror}")


def _check_prerequisites(settings: Settings) -> Iterator[CheckResult]:
    """Yield missing prerequisites, except accounts, ansible and ssh, which have their own checks."""
    for missing in find_missing_prerequisites(settings):
        if not missing.setting.startswith(("socket_group", "ansible.", "ssh.")):
            yield CheckResult(missing.setting, False, missing.text)


class _CheckFailed(RolloutdError):
    pass


async def _check_content(settings: Settings) -> list[CheckResult]:
    """Check what the database says: its facts, and what they need on this machine and the nodes."""
    compiler = TeamPlanCompiler(settings.teams)
    store = await open_store(
        settings.state_dir, settings.store.postgresql, compile_plan=compiler, read_only=True
    )
    try:
        return [
            await _run_check("invariants", lambda: _check_invariants(settings, store, compiler)),
            await _run_check("playbooks", lambda: _check_playbooks(settings, store)),
            *await _check_pipelining(settings, store),
        ]
    finally:
        await store.close()


async def _check_invariants(settings: Settings, store: Store, compiler: TeamPlanCompiler) -> str:
    snapshot = await store.load_snapshot()
    violations = find_violations(Projection.build(snapshot, compile_limits(settings), compiler))
    if violations:
        more = (
            f"; and {len(violations) - MAX_LISTED_VIOLATIONS} more"
            if len(violations) > MAX_LISTED_VIOLATIONS
            else ""
        )
        raise _CheckFailed(
            f"{'; '.join(violations[:MAX_LISTED_VIOLATIONS])}{more}; pause the rollouts and "
            "inspect these nodes"
        )
    rollouts, targets = (
        pluralize(len(snapshot.rollouts), "live rollout"),
        pluralize(len(snapshot.targets), "target"),
    )
    return f"no contradiction in {rollouts} with {targets}"


async def _check_playbooks(settings: Settings, store: Store) -> str:
    """Check the source trees of live rollouts: a backup of the database does not contain them."""
    live = [rollout.id for rollout in (await store.load_snapshot()).rollouts if not rollout.closed]
    pins = {rollout: (await store.load_plan(rollout))[1] for rollout in live}
    places = {
        rollout: tree_directory(settings.files_dir, PinnedSource.from_record(pin))
        for rollout, pin in pins.items()
    }
    missing = [rollout for rollout, place in places.items() if not await threads.FILES.run(place.is_dir)]
    if missing and settings.shared_files.s3 is not None:
        bucket = open_bucket(settings.shared_files.s3, TREES_DIRECTORY)
        stored = await threads.BUCKET.run(bucket.names)
        missing = [rollout for rollout in missing if places[rollout].name not in stored]
    if missing:
        raise _CheckFailed(
            f"those of {', '.join(missing)} are missing in {settings.files_dir}/trees; copy them from the"
            " original machine, or submit the same plans again: their rollouts continue"
        )
    return f"those of {pluralize(len(live), 'live rollout')} are kept"


async def _check_pipelining(settings: Settings, store: Store) -> list[CheckResult]:
    """Suggest pipelining where the settings leave it to the users' configuration."""
    if settings.ansible.pipelining == "on":
        return []
    key = load_redaction_key(settings.state_dir, settings.redaction_key_file)
    connections = {name: unseal(each, key) for name, each in (await store.load_connections()).items()}
    shell = SshShell(settings.ssh.known_hosts, settings.ssh.user, settings.ssh.key_file)
    try:
        suggestion = await suggest_pipelining(shell, connections)
    finally:
        await shell.close()
    return [] if suggestion is None else [suggestion]


async def _check_files(settings: Settings) -> str:
    s3 = settings.shared_files.s3
    if s3 is not None:
        await threads.BUCKET.run(open_bucket(s3, "checks").check)
        return f"bucket {s3.bucket} can be written, read, listed and emptied"
    await threads.FILES.run(_write_and_remove, settings.files_dir)
    return f"{settings.files_dir} can be written; all machines must mount it"


def _write_and_remove(directory: Path) -> None:
    if not directory.is_dir():
        raise _CheckFailed(f"{directory}: no such directory; mount it on all machines")
    with tempfile.TemporaryFile(dir=directory):
        pass


# -- accounts and programs ----------------------------------------------------


def _check_accounts(settings: Settings) -> str:
    """Check the names in the settings: an unknown member opens no gate, and no other error reports it."""
    named = {f"teams.{name}.members": team.members for name, team in settings.teams.items()}
    named["admins"] = settings.admins
    missing = [
        f"{where}: {member}"
        for where, members in named.items()
        for member in members
        if not _is_known_account(member)
    ]
    if settings.socket_group is not None and not _is_known_account(f"@{settings.socket_group}"):
        missing.append(f"socket_group: {settings.socket_group}")
    if missing:
        raise _CheckFailed(
            f"this machine does not know {', '.join(missing)}: make them, or change the settings"
        )
    known = pluralize(len({member for members in named.values() for member in members}), "name")
    return f"{known}, all known here"


def _is_known_account(member: str) -> bool:
    """Return whether this machine's name service knows a user, or an @group."""
    try:
        grp.getgrnam(member[1:]) if member.startswith("@") else pwd.getpwnam(member)
    except KeyError:
        return False
    return True


async def _check_ansible(settings: Settings) -> str:
    default = Path(sys.executable).with_name("ansible-playbook")
    binary = str(settings.ansible.bin or default)
    advice = "name ansible.bin in the settings, or install ansible-core with rolloutd"
    return (await _query_version([binary, "--version"], advice)).splitlines()[0]


async def _check_ssh(settings: Settings) -> str:
    version = await _query_version(["ssh", "-V"], "install OpenSSH's client")
    for path, what in ((settings.ssh.known_hosts, "host keys"), (settings.ssh.key_file, "private key")):
        if path is None:
            continue
        if not path.is_file():
            raise _CheckFailed(
                f"{path}: no such file ({what} of the settings); make it, or change ssh in the settings"
            )
        if not os.access(path, os.R_OK):
            raise _CheckFailed(
                f"{path} ({what}) cannot be read by the daemon's user: chgrp rolloutd, mode 0640"
            )
    key = settings.ssh.key_file
    if key is not None and key.stat().st_uid == os.geteuid() and key.stat().st_mode & 0o077:
        raise _CheckFailed(f"{key} is open to others and ssh will not use it: chmod 600 {key}")
    certificate = Path(f"{key}-cert.pub")
    if key is not None and await threads.FILES.run(certificate.is_file):
        return f"{version.strip()}; {await _check_certificate(certificate)}"
    return version.strip()


async def _check_certificate(certificate: Path) -> str:
    """Return until when the user certificate next to the key is valid; raises _CheckFailed if it is not."""
    text = await _query_version(["ssh-keygen", "-L", "-f", str(certificate)], "renew the certificate")
    valid = re.search(r"Valid: from (\S+) to (\S+)", text)
    if valid is None:
        return f"{certificate.name} has no end"
    begin, end = (datetime.fromisoformat(part).astimezone() for part in valid.groups())
    if not begin <= datetime.now().astimezone() < end:
        raise _CheckFailed(f"{certificate}: valid from {begin} to {end}, and not now; renew it")
    return f"{certificate.name} is valid until {end:%Y-%m-%d %H:%M %Z}"


async def _query_version(command: Sequence[str], advice: str) -> str:
    """Return a program's version text; raises _CheckFailed."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as error:
        raise _CheckFailed(f"{command[0]} cannot be run ({error.strerror}): {advice}") from error
    try:
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise _CheckFailed(
            f"{command[0]} did not answer within {COMMAND_TIMEOUT_S:.0f} s: {advice}"
        ) from None
    text = output.decode(errors="replace").strip()
    if process.returncode or not text:
        last = text.splitlines()[-1][-300:] if text else "no output"
        raise _CheckFailed(f"{command[0]} ended with {process.returncode} ({last}): {advice}")
    return text


# -- the daemon and the sources -----------------------------------------------


def _report_unreachable(path: Path, unreachable: DaemonUnreachable) -> CheckResult:
    """Return a result that distinguishes a stopped daemon, a missing permission and a hanging daemon."""
    match unreachable.__cause__:
        case FileNotFoundError() | ConnectionRefusedError():
            return _report_stopped(path)
        case PermissionError():
            text = f"you may not ask at {path}: run this as root, or as a member of the socket's group"
            return CheckResult("daemon", False, text)
    return CheckResult("daemon", False, f"{unreachable}; `systemctl status rolloutd` and its journal say why")


def _report_stopped(path: Path) -> CheckResult:
    """Return a failed result if a daemon should answer; one that was never started is fine."""
    expected = describe_expected_unit(path) or ("the socket is there" if path.exists() else None)
    if expected is None:
        return CheckResult("daemon", True, f"not running at {path} (systemctl start rolloutd)")
    advice = "read journalctl -u rolloutd -e, then systemctl start rolloutd"
    return CheckResult("daemon", False, f"not running at {path}, but {expected}; {advice}")


# -- the stored facts ---------------------------------------------------------

# The daemon checks each change before it commits it; this checks the stored result, whatever wrote it.


def find_violations(index: Index) -> list[str]:
    return [
        fault
        for rollout in index.rollouts.values()
        for target in index.targets(rollout.id)
        for fault in _find_target_violations(index, rollout, target)
    ]


def _find_target_violations(index: Index, rollout: Rollout, target: Target) -> Iterator[str]:
    where = f"{target.node} of {rollout.id}"
    if target.phase in IN_FLIGHT_PHASES:
        others = [t.rollout for t in index.targets_on(target.node) if t.phase in IN_FLIGHT_PHASES]
        if len(others) > 1:
            yield f"{target.node} is in flight in {' and '.join(sorted(others))} at once"
        if not target.attempt:
            yield f"{where} is {target.phase} without ever having been admitted"
    if target.phase is Phase.FAILED and target.failure is None:
        yield f"{where} has failed without a failure"
    entry = GateName.PILOT if target.wave == PILOT_WAVE else GateName.START
    if target.attempt and not any(opened.gate is entry for opened in rollout.opened):
        yield f"{where} was admitted while the gate {entry} was never open"
    # A failed node that waits for its retry stays isolated, which is not a violation.
    retry = any(each.node == target.node and each.attempt == target.attempt for each in rollout.failures)
    if target.isolated and target.phase is Phase.PENDING and target.order is None and not retry:
        yield f"{where} is pending and still isolated by us"


def describe_expected_unit(socket: Path) -> str | None:
    """Return which enabled or started unit should answer at this socket; None without one."""
    units = _query_units()
    if not any(unit.get("Listen", "").startswith(f"{socket} ") for unit in units):
        return None
    for unit in units:
        is_enabled, state = unit.get("UnitFileState") == "enabled", unit.get("ActiveState", STOPPED)
        if is_enabled or state != STOPPED:
            return f"{unit['Id']} is {'enabled and ' if is_enabled else ''}{state}"
    return None


def _query_units() -> list[dict[str, str]]:
    """Return the properties of the installed units; empty where no systemd answers."""
    command = ["systemctl", "show", "--property=Id,UnitFileState,ActiveState,Listen", *UNITS]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    blocks = result.stdout.split("\n\n") if result.returncode == 0 else []
    return [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in blocks]
