"""`rolloutctl hosts scan` over real sshd nodes, with the daemon that audits what it stores."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.ports import Host
from tests.support.daemon_environment import DaemonEnvironment, daemon_environment
from tests.support.fake_netbox.fleet import Fleet, custom_field, device
from tests.support.fake_netbox.server import V1, FakeNetbox
from tests.support.forked_process import run_forked

SCAN = "rolloutd.admin.host_keys.__main__"
LIMIT_S = 120.0
LABELS = {"n1": {"team": "t1"}, "n2": {"team": "t2"}}

pytestmark = pytest.mark.servers


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonEnvironment]:
    """Two nodes and a daemon that has none of their host keys yet."""
    directory = tmp_path_factory.mktemp("h")
    with daemon_environment(directory, LABELS, ssh={"known_hosts": str(directory / "trusted")}) as made:
        yield made


def scan(fleet: DaemonEnvironment, **options: Any) -> subprocess.CompletedProcess[str]:
    given = {"config": str(fleet.directory / "config.yaml"), **options}
    return run_forked(SCAN, [json.dumps(given)], timeout_s=LIMIT_S)


def states(fleet: DaemonEnvironment, **options: Any) -> dict[str, list[str]]:
    done = scan(fleet, json=True, **options)
    return {node["node"]: [key["state"] for key in node["keys"]] for node in json.loads(done.stdout)["nodes"]}


def fingerprint_line(fleet: DaemonEnvironment, node: str) -> str:
    """Return the line that the node's console has, by ssh-keygen as cloud-init does."""
    key = fleet.sshds[node].directory / "host_key.pub"
    return subprocess.run(["ssh-keygen", "-lf", key], capture_output=True, text=True, check=True).stdout


def console(fleet: DaemonEnvironment, text: str) -> Path:
    directory = fleet.directory / "console"
    directory.mkdir(exist_ok=True)
    (directory / "n1.log").write_text(f"[   12.3] boot\x1b[31m\n{text}\nlogin: ")
    return directory


def audited(fleet: DaemonEnvironment) -> list[dict[str, Any]]:
    entries = fleet.client.get("/v1/audit?kind=HostKeysStored")["entries"]
    return [{**entry["entry"]["fields"], "node": entry["entry"]["node"]} for entry in entries]


async def can_log_in(fleet: DaemonEnvironment, node: str) -> bool:
    shell = SshShell(fleet.directory / "trusted")
    host = Host(node, connection=fleet.sshds[node].connection("127.0.0.1"))
    try:
        return (await shell.run(host, "true", timeout_s=LIMIT_S)).exit_status == 0
    except Exception:
        return False
    finally:
        await shell.close()


async def test_confirmed_keys_are_stored_and_audited(fleet: DaemonEnvironment) -> None:
    directory, trusted = console(fleet, fingerprint_line(fleet, "n1")), fleet.directory / "trusted"
    shown = scan(fleet, console=[str(directory)])
    assert (shown.returncode, trusted.exists(), audited(fleet)) == (1, False, [])
    [first, second] = shown.stdout.splitlines()[1:]
    assert ("confirmed" in first, str(directory / "n1.log") in first, "unconfirmed" in second) == (
        True,
        True,
        True,
    )

    sure = scan(fleet, console=[str(directory)], yes=True, reason="new rack")
    assert (sure.returncode, sure.stderr.count("stored")) == (1, 1), "n2 is left"
    [entry] = audited(fleet)
    fingerprint = fingerprint_line(fleet, "n1").split()[1]
    assert (entry["node"], entry["stored"], entry["confirmed_by"], entry["reason"]) == (
        "n1", [f"ssh-ed25519 {fingerprint}"], [str(directory / "n1.log")], "new rack",
    )  # fmt: skip
    assert [await can_log_in(fleet, node) for node in LABELS] == [True, False]

    assert scan(fleet, yes=True, unconfirmed=True, reason="seen on the console").returncode == 0
    assert await can_log_in(fleet, "n2")
    assert states(fleet) == {"n1": ["stored"], "n2": ["stored"]}
    assert scan(fleet, yes=True, unconfirmed=True, reason="again").returncode == 0
    assert len(audited(fleet)) == 2


async def test_changed_key_is_replaced_only_by_name(fleet: DaemonEnvironment) -> None:
    scan(fleet, yes=True, unconfirmed=True, reason="first")
    trusted, sshd = fleet.directory / "trusted", fleet.sshds["n1"]
    old_line = fingerprint_line(fleet, "n1")
    with trusted.open("a") as opened:
        opened.write("# kept\n*.example ssh-ed25519 AAAA\n")
    before = trusted.read_text()
    sshd.stop()
    for name in ("host_key", "host_key.pub"):
        (sshd.directory / name).unlink()
    sshd.start(sshd.directory)

    warned = scan(fleet, yes=True, unconfirmed=True, reason="again")
    assert (warned.returncode, "this may be an attack" in warned.stderr) == (1, True)
    contradicted = scan(fleet, yes=True, reason="x", replace=["n1"], console=[str(console(fleet, old_line))])
    assert "NOT " in contradicted.stdout
    assert (contradicted.returncode, trusted.read_text()) == (1, before)

    assert scan(fleet, yes=True, reason="reinstalled", replace=["n1"]).returncode == 0
    after = trusted.read_text().splitlines()
    assert [line for line in after if line in before.splitlines()][1:] == [
        "# kept",
        "*.example ssh-ed25519 AAAA",
    ]
    assert len(after) == len(before.splitlines())
    [entry] = [entry for entry in audited(fleet) if entry["replaced"]]
    assert entry["replaced"] == [f"ssh-ed25519 {old_line.split()[1]}"]
    assert await can_log_in(fleet, "n1")


def test_key_of_another_type_is_a_changed_key(fleet: DaemonEnvironment) -> None:
    """Else who offers no key of the stored type would be trusted as well."""
    scan(fleet, yes=True, unconfirmed=True, reason="first")
    trusted, sshd = fleet.directory / "trusted", fleet.sshds["n1"]
    before = trusted.read_text()
    sshd.stop()
    key = sshd.directory / "host_key"
    for path in (key, Path(f"{key}.pub")):
        path.unlink()
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", key], check=True)
    sshd.start(sshd.directory)
    done = scan(fleet, yes=True, unconfirmed=True, reason="again")
    assert (done.returncode, trusted.read_text()) == (1, before)
    assert states(fleet)["n1"] == ["changed"]
    assert scan(fleet, yes=True, reason="reinstalled", replace=["n1"]).returncode == 0
    assert states(fleet) == {"n1": ["stored"], "n2": ["stored"]}
    assert len(trusted.read_text().splitlines()) == len(before.splitlines())


async def test_netbox_field_confirms_a_key(fleet: DaemonEnvironment) -> None:
    """NetBox has the public key of n1 and a wrong fingerprint of n2, each in a custom field."""
    (first, second), directory = (device(number) for number in (1, 2)), fleet.directory
    public = (fleet.sshds["n1"].directory / "host_key.pub").read_text()
    first |= {"name": "n1", "custom_fields": {"ssh_host_key": public}}
    second |= {"name": "n2", "custom_fields": {"ssh_host_key": f"SHA256:{'a' * 43} (ED25519)"}}
    field = custom_field("ssh_host_key", "text")
    async with FakeNetbox(Fleet([first, second], [], [field])) as netbox:
        (directory / "token").write_text(V1)
        labels = {"host_key": "custom_fields.ssh_host_key"}
        source = {
            "url": netbox.url,
            "token_file": str(directory / "token"),
            "labels": labels,
            "address": "none",
        }
        settings = {**fleet.settings, "inventory": [*fleet.settings["inventory"], {"netbox": source}]}
        (directory / "netbox.yaml").write_text(yaml.safe_dump(settings))
        done = await asyncio.to_thread(scan, fleet, config=str(directory / "netbox.yaml"), json=True)
    keys = {node["node"]: node["keys"] for node in json.loads(done.stdout)["nodes"]}
    assert [(key["state"], key["confirmed_by"]) for key in keys["n1"]] == [("confirmed", ["inventory"])]
    assert [key["state"] for key in keys["n2"]] == ["contradicted"]


def test_without_daemon_keys_are_only_printed(fleet: DaemonEnvironment) -> None:
    fleet.kill_daemon()
    done = scan(fleet, yes=True, unconfirmed=True, reason="first")
    assert done.returncode == 1
    assert "nothing was stored: start the daemon" in done.stderr
    assert fleet.sshds["n1"].known_hosts.read_text().strip().split()[2] in done.stderr
    assert not (fleet.directory / "trusted").exists()


def test_unreachable_node_does_not_hold_the_others(fleet: DaemonEnvironment) -> None:
    fleet.sshds["n2"].stop()
    done = scan(fleet, json=True)
    first, second = json.loads(done.stdout)["nodes"]
    assert (len(first["keys"]), second["keys"], "refused" in second["problem"]) == (1, [], True)


def test_terminal_is_asked_for_each_kind(fleet: DaemonEnvironment) -> None:
    directory = console(fleet, fingerprint_line(fleet, "n1"))
    terminal, inside = pty.openpty()
    words = ["hosts", "scan", "--config", str(fleet.directory / "config.yaml"), "--console", str(directory)]
    with subprocess.Popen(
        [sys.executable, "-m", "rolloutd.cli", *words],
        cwd=Path(__file__).parents[2], stdin=inside, stdout=subprocess.PIPE, stderr=inside, text=True,
    ) as asked:  # fmt: skip
        os.write(terminal, b"y\nn\nrack 7\n")
        asked.communicate(timeout=LIMIT_S)
    os.close(inside)
    shown = os.read(terminal, 65536).decode()
    os.close(terminal)
    assert "Store 1 confirmed keys?" in shown, shown
    assert [entry["node"] for entry in audited(fleet)] == ["n1"]
