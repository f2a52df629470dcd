"""Checks of outside systems: inventory sources, balancers, logins on nodes.

The systems are reached as the settings say, by the daemon's own adapters.
"""

from __future__ import annotations

import asyncio
import shlex
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rolloutd import ports
from rolloutd.adapters.ansible.runner import AnsibleRunner
from rolloutd.adapters.haproxy.runtime_api import BalancerUnreachable, HaproxyFailed, choose_balancers
from rolloutd.adapters.registry import create_adapter
from rolloutd.adapters.sources.tree_store import tree_directory
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.adapters.timers import SystemClock
from rolloutd.admin.disk import CheckResult
from rolloutd.errors import HostKeyChanged, NodeUnreachable, RolloutdError
from rolloutd.plugin import INVENTORIES, RUNNERS
from rolloutd.settings import Settings
from rolloutd.texts.formats import pluralize

LOGIN_TIMEOUT_S = 15.0
"""Limit of one login with its test: a healthy node needs a second, a dead one the connect timeout of 10 s."""

MAX_LOGINS = 10
"""Nodes on which a login is tested: one of each team shows what a team's image lacks."""

TEST_NODE = (
    "command -v python3 >/dev/null || echo no-python3;"
    " [ $(id -u) = 0 ] || LC_ALL=C sudo -n true >/dev/null 2>&1 || echo no-sudo;"
    ' d=$1; until [ -e "$d" ]; do d=${d%/*}; d=${d:-/}; done; [ -w "$d" ] || echo no-fence'
)
"""What a run needs on a node, each missing thing as one word."""

NO_PYTHON = "python3 is not installed, which Ansible's modules need"
NO_SUDO = "sudo asks for a password; add the sudoers line, or ansible_become_password to the inventory"

BECOME_PASSWORDS = ("ansible_become_password", "ansible_become_pass", "ansible_sudo_pass")


@dataclass(frozen=True, slots=True)
class SourceReading:
    check: CheckResult
    nodes: Sequence[ports.DiscoveredNode] = ()
    rights: tuple[CheckResult, ...] = ()


def failed_check(subject: str, problem: Exception | str) -> CheckResult:
    """Return the result of a check that failed; the subject is not repeated in its text."""
    return CheckResult(subject, False, str(problem).removeprefix(f"{subject}: "))


@asynccontextmanager
async def open_systems(
    settings: Settings, hosts: Mapping[str, Mapping[str, ports.JSON]] | None = None
) -> AsyncIterator[ports.AdapterContext]:
    """Yield what adapters need; `hosts` are the variables of nodes by name, where they are known."""
    shell = SshShell(settings.ssh.known_hosts, settings.ssh.user, settings.ssh.key_file)
    with tempfile.TemporaryDirectory(prefix="rolloutd-") as place:
        snapshot = ports.InventorySnapshot(
            {name: dict(variables) for name, variables in (hosts or {}).items()}
        )
        find_tree = partial(tree_directory, settings.files_dir)
        runner = AnsibleRunner(Path(place), shell, find_tree, lambda: snapshot)
        systems = ports.AdapterContext(shell, SystemClock(), runner, lambda: snapshot, settings)
        try:
            yield systems
        finally:
            for system in systems.shared.values():
                await system.close()
            await shell.close()


async def read_sources(systems: ports.AdapterContext, *, nodes: bool = True) -> list[SourceReading]:
    """Read every source of the settings; without `nodes` only its rights."""
    readings = []
    for source in systems.settings.inventory:
        try:
            inventory: ports.Inventory = create_adapter(
                INVENTORIES, source.kind, replace(systems, params=source.params)
            )
        except RolloutdError as error:
            readings.append(SourceReading(failed_check(source.kind, error)))
        else:
            readings.append(await _read_source(inventory, nodes=nodes))
    return readings


async def _read_source(inventory: ports.Inventory, *, nodes: bool) -> SourceReading:
    check, reported = CheckResult(inventory.source, True, "not read"), list[ports.DiscoveredNode]()
    if nodes:
        try:
            reported = list(await inventory.refresh())
            text = pluralize(len(reported), "node") if reported else "it names no node at all"
            check = CheckResult(inventory.source, bool(reported), text)
        except RolloutdError as error:
            return SourceReading(failed_check(inventory.source, error))
    rights: tuple[CheckResult, ...] = ()
    if isinstance(inventory, ports.SupportsPreflight):
        subject, problems = f"{inventory.source} rights", await inventory.find_missing_prerequisites()
        rights = tuple(CheckResult(subject, False, text) for text in problems)
        rights = rights or (CheckResult(subject, True, "all that are needed"),)
    return SourceReading(check, reported, rights)


async def check_balancers(systems: ports.AdapterContext) -> list[CheckResult]:
    """Check that each balancer answers, and that its socket may change servers."""
    section = systems.settings.section("haproxy")
    known_nodes = systems.inventory().hosts
    results = []
    for balancer in choose_balancers({}, systems) if section else []:
        subject = f"haproxy {balancer.name}"
        node = getattr(section[balancer.name], "node", None)
        if "node" in section[balancer.name].model_fields_set and node not in known_nodes:
            results.append(CheckResult(subject, True, f"not tested: it is reached through node {node}"))
            continue
        try:
            servers = await balancer.list_servers()
        except (BalancerUnreachable, HaproxyFailed) as error:
            results.append(failed_check(subject, error))
        else:
            backends = pluralize(len({backend for backend, _ in servers}), "backend")
            text = f"{pluralize(len(servers), 'server')} in {backends}, level admin"
            results.append(CheckResult(subject, True, text))
    return results


async def check_runners(systems: ports.AdapterContext) -> list[CheckResult]:
    """Check that each runner of the settings is available and has what it needs."""
    results = []
    for each in systems.settings.runners:
        subject = f"runner {each.runner_name}"
        assert isinstance(systems.runner, AnsibleRunner)
        context = ports.RunnerContext(
            each.runner_name,
            systems.shell,
            systems.clock,
            systems.inventory,
            systems.settings,
            partial(tree_directory, systems.settings.files_dir),
            params=each.params,
            stale_runs=systems.runner,
            shared=systems.shared,
        )
        try:
            runner: ports.Runner = create_adapter(RUNNERS, each.kind, context)
            await runner.check_available()
            problems = (
                await runner.find_missing_prerequisites() if isinstance(runner, ports.ChecksItsSystem) else ()
            )
        except RolloutdError as error:
            results.append(failed_check(subject, error))
        else:
            results += [failed_check(subject, problem) for problem in problems]
            results += [] if problems else [CheckResult(subject, True, "available")]
    return results


async def check_logins(shell: ports.Shell, hosts: Sequence[ports.Host], fence_dir: str) -> list[CheckResult]:
    """Log in to the first nodes of the sequence, all at once, and test what runs need there."""
    return await asyncio.gather(*(_check_login(shell, host, fence_dir) for host in hosts[:MAX_LOGINS]))


async def _check_login(shell: ports.Shell, host: ports.Host, fence_dir: str) -> CheckResult:
    subject = f"login {host.name}"
    try:
        tested = await shell.run(
            host, f"sh -s -- {shlex.quote(fence_dir)}", timeout_s=LOGIN_TIMEOUT_S, stdin=TEST_NODE
        )
    except (NodeUnreachable, HostKeyChanged) as error:
        return CheckResult(subject, False, str(error).removeprefix(f"{host.name}: "))
    except TimeoutError as error:
        return CheckResult(subject, False, f"{error}; log in there and look at its load")
    words = tested.stdout.split()
    problems = [NO_PYTHON] if "no-python3" in words else []
    has_password = any(host.connection.get(name) for name in BECOME_PASSWORDS)
    needs_sudo = host.connection.get("ansible_become") not in (False, "false", "no")
    if "no-sudo" in words and needs_sudo and not has_password:
        problems.append(NO_SUDO)
    place = f"the home directory, since {fence_dir} cannot be written" if "no-fence" in words else fence_dir
    text = "; ".join(problems) or f"python3 and sudo are usable; the fence is in {place}"
    return CheckResult(subject, not problems, text)
