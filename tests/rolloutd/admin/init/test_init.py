"""`rolloutctl init` over real sshd nodes: what it writes, keeps, refuses and prints."""

from __future__ import annotations

import json
import os
import pty
import pwd
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutd.admin.disk import CheckResult
from rolloutd.admin.init.discovery import Machine
from rolloutd.admin.init.options import Dialog, Options
from rolloutd.admin.init.setup import Setup, propose_settings
from rolloutd.settings import load
from tests.support.cluster_sandbox import ClusterSandbox, KubernetesApi
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.fake_netbox.fleet import Fleet
from tests.support.fake_netbox.server import V1, FakeNetbox
from tests.support.forked_process import run_forked
from tests.support.haproxy import Haproxy
from tests.support.sshd import Sshd

INIT = "rolloutd.admin.init.__main__"
ROOT = Path(__file__).parents[4]

LIMIT_S = 120.0
"""A run takes some seconds; on a loaded machine some times that."""

TEAMS = {"n1": "web", "n2": "db"}

Init = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Sshd]]:
    servers = {name: Sshd().start(tmp_path_factory.mktemp(name)) for name in TEAMS}
    yield servers
    for server in servers.values():
        server.stop()


@pytest.fixture
def etc(tmp_path: Path, nodes: dict[str, Sshd]) -> Path:
    """A directory for settings with an inventory of two nodes and their host keys."""
    hosts = {
        name: {**server.connection(), "team": TEAMS[name], "rack": f"r-{name}", "canary": name == "n1"}
        for name, server in nodes.items()
    }
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    (tmp_path / "known_hosts").write_text("".join(each.known_hosts.read_text() for each in nodes.values()))
    return tmp_path


@pytest.fixture
def init(etc: Path) -> Init:
    """Run init on these settings, without what else is on this machine."""

    def run(**options: Any) -> subprocess.CompletedProcess[str]:
        given = {"config": str(etc / "config.yaml"), "no_search": True, **options}
        return run_forked(INIT, [json.dumps(given)], timeout_s=LIMIT_S)

    return run


def first(init: Init, etc: Path, **options: Any) -> dict[str, Any]:
    """Run init for the first time, and return its JSON."""
    usual = {
        "inventory": [str(etc / "hosts.yml")],
        "state_dir": str(etc / "state"),
        "yes": True,
        "json": True,
    }
    done = init(**{**usual, **options})
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_first_settings_are_valid_and_explained(init: Init, etc: Path) -> None:
    answer = first(init, etc)
    settings = load(etc / "config.yaml")
    assert [source.params["labels"] for source in settings.inventory] == [["team", "rack", "canary"]]
    assert set(settings.pools) == {"team", "rack"}
    assert set(settings.teams) == {"infra", "web", "db"}
    assert settings.observe_only
    text = (etc / "config.yaml").read_text()
    assert text.count("# ") > len(answer["choices"]), "each choice has its reason"
    assert {check["subject"]: check["ok"] for check in answer["checks"]} == {
        f"ansible:{etc}/hosts.yml": True, "people": True, "ansible": True, "ssh": True,
        "login n1": True, "login n2": True,
    }  # fmt: skip
    targets = {target["node"]: target["wave"] for target in answer["preview"]["targets"]}
    assert targets == {"n1": "canary", "n2": "canary"}
    assert "each team" not in answer["preview_problem"]


def test_second_run_changes_only_what_is_asked(init: Init, etc: Path) -> None:
    first(init, etc)
    path = etc / "config.yaml"
    path.write_text(path.read_text().replace("\npools:", "\n# the racks share a switch\npools:   # mine"))
    path.chmod(0o640)
    before = path.read_text()
    assert not json.loads(init(yes=True, json=True).stdout)["written"]
    assert path.read_text() == before
    answer = json.loads(init(yes=True, json=True, pool=["rack=2"], team=["web=alice"]).stdout)
    assert (answer["written"], [choice["key"] for choice in answer["choices"]]) == (
        True, ["pools.rack.max_unavailable", "teams.web.members.[]"],
    )  # fmt: skip
    removed = [line for line in answer["diff"].splitlines()[2:] if line.startswith("-")]
    assert removed == ["-  rack: {max_unavailable: 1}", "-  web: {members: []}"]
    assert "# the racks share a switch\npools:   # mine" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o640
    assert load(path).pools["rack"].max_unavailable == 2


def test_nothing_is_written_unasked(init: Init, etc: Path) -> None:
    inventory = [str(etc / "hosts.yml")]
    dry = init(inventory=inventory, dry_run=True)
    assert (dry.returncode, "+  - ansible: {path: hosts.yml" in dry.stdout) == (0, True)
    silent = init(inventory=inventory)
    assert (silent.returncode, silent.stderr) == (
        2, "rolloutctl init: no terminal to ask at; add --yes to take what it proposes\n",
    )  # fmt: skip
    assert sorted(path.name for path in etc.iterdir()) == ["hosts.yml", "known_hosts"]


def test_no_inventory_writes_and_proposes_nothing(init: Init, etc: Path) -> None:
    for options in ({"yes": True}, {"dry_run": True}, {"yes": True, "json": True}):
        done = init(**options)
        assert (done.returncode, done.stdout) == (2, "")
        assert "no inventory is here, and nothing was written; name one with --inventory" in done.stderr
    assert not (etc / "config.yaml").exists()


def test_large_nested_inventory_stays_readable(init: Init, etc: Path) -> None:
    teams = {
        f"t{team}": {
            "vars": {"team": f"team-{team}" if team else "Data & ML"},
            "children": {
                f"t{team}_r{rack}": {
                    "vars": {"rack": f"r{rack}"},
                    "hosts": {f"n{team}{rack}{number}": {} for number in range(5)},
                }
                for rack in range(5)
            },
        }
        for team in range(8)
    }
    inventory = {"all": {"children": {"site": {"vars": {"site": "ams"}, "children": teams}}}}
    (etc / "many.yml").write_text(yaml.safe_dump(inventory))
    options = {"inventory": [str(etc / "many.yml")], "state_dir": str(etc / "state"), "yes": True}
    done = init(**options, dry_run=True)
    lines = done.stdout.splitlines()
    assert (done.returncode, len(re.findall(r"(?m)^n\d{3}  ", done.stdout))) == (0, 20)
    assert "shown: the first 20 of 200 nodes (--json has all)" in lines
    assert "continue   1 of the owner, 1 of each team" in done.stdout
    assert "team-1: no voters" in done.stdout
    assert len([line for line in lines if line.startswith("WRONG login")]) == 1, "there is no key yet"
    answer = json.loads(init(**options, dry_run=True, json=True).stdout)
    assert len(answer["preview"]["targets"]) == 200
    assert [note.partition(";")[0] for note in answer["notes"]] == [
        "label team: 'Data & ML' cannot be the name of a team"
    ]
    assert len([choice for choice in answer["choices"] if choice["key"].startswith("teams.")]) == 7 + 1


def test_source_that_fails_is_not_written(init: Init, etc: Path) -> None:
    (etc / "broken.yml").write_text("all: [")
    done = init(inventory=[str(etc / "broken.yml")], yes=True)
    assert done.returncode == 1
    assert "nothing was written: ansible:" in done.stderr
    assert not (etc / "config.yaml").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [(b"poools: {}\n", "poools"), (b"a: [\n", "config.yaml:"), (b"a: \xff\n", "not UTF-8")],
)
def test_settings_with_mistakes_are_left_alone(init: Init, etc: Path, text: bytes, said: str) -> None:
    (etc / "config.yaml").write_bytes(text)
    done = init(inventory=[str(etc / "hosts.yml")], yes=True)
    assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (1, True, False), done.stderr
    assert (etc / "config.yaml").read_bytes() == text


def test_keys_of_later_files_are_not_proposed(init: Init, etc: Path) -> None:
    (etc / "config.d").mkdir()
    later = "observe_only: false\npools: {rack: {max_unavailable: 3}}\n"
    (etc / "config.d/infra.yaml").write_text(later)
    answer = first(init, etc)
    assert "observe_only" not in [choice["key"] for choice in answer["choices"]]
    settings = load(etc / "config.yaml")
    assert (settings.observe_only, settings.pools["rack"].max_unavailable) == (False, 3)


@pytest.mark.long
def test_later_file_with_the_key_is_named(init: Init, etc: Path) -> None:
    first(init, etc)
    (etc / "config.d").mkdir()
    (etc / "config.d/infra.yaml").write_text("pools: {rack: {max_unavailable: 3}}\n")
    done = init(pool=["rack=2"], yes=True)
    assert (done.returncode, "config.d/infra.yaml sets it too" in done.stderr) == (1, True)


def test_new_key_is_private_and_printed(init: Init, etc: Path) -> None:
    answer = first(init, etc, ssh_key=str(etc / "id_new"), ssh_user="ops")
    key = etc / "id_new"
    assert key.stat().st_mode & 0o777 == 0o600
    public = Path(f"{key}.pub").read_text().strip()
    assert answer["nodes"]["public_key"] == public
    assert answer["nodes"]["sudoers"] == "ops ALL=(ALL) NOPASSWD: ALL"
    [play] = yaml.safe_load(answer["nodes"]["playbook"])
    assert play["vars"]["rolloutd_public_key"] == public
    private = key.read_text()
    assert private not in json.dumps(answer)
    assert private not in (etc / "config.yaml").read_text()


@pytest.mark.long
def test_playbook_prepares_a_node_once(init: Init, etc: Path, nodes: dict[str, Sshd]) -> None:
    """With the places of this machine replaced: the node is this machine."""
    first(init, etc, ssh_key=str(etc / "id_new"), ssh_user="ops", nodes_playbook=str(etc / "prepare.yml"))
    account = pwd.getpwnam(nodes["n1"].user)
    home, sudoers, fence = etc / "home", etc / "sudoers.d", etc / "fence"
    sudoers.mkdir()
    (etc / "visudo").write_text('#!/bin/sh\nexec grep -q "NOPASSWD: ALL$" "$2"\n')
    (etc / "visudo").chmod(0o755)
    places = {
        "rolloutd_user": nodes["n1"].user, "rolloutd_ssh_dir": str(home), "rolloutd_fence_dir": str(fence),
        "rolloutd_sudoers_dir": str(sudoers), "rolloutd_visudo": str(etc / "visudo"),
    }  # fmt: skip
    ansible = str(Path(sys.executable).with_name("ansible-playbook"))
    command = [
        ansible, "-i", str(etc / "hosts.yml"), "--limit", "n1",
        "--ssh-common-args", f"-o UserKnownHostsFile={etc / 'known_hosts'}", "-e", json.dumps(places),
        str(etc / "prepare.yml"),
    ]  # fmt: skip
    environment = {**os.environ, "ANSIBLE_LOCAL_TEMP": str(etc / "tmp"), "ANSIBLE_HOME": str(etc / "ansible")}
    for expected in ("changed=3", "changed=0"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
        assert (done.returncode, expected in done.stdout) == (0, True), done.stdout + done.stderr
    assert pwd.getpwnam(nodes["n1"].user) == account, "a user who exists stays as it is"
    public = (etc / "id_new.pub").read_text()
    assert (home / "authorized_keys").read_text() == public
    assert fence.stat().st_mode & 0o777 == 0o700


async def test_every_kind_of_system_is_found(etc: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("root")
    balancer = Haproxy(root / "lb", {"n1": 9}).start()
    (root / "etc/haproxy").mkdir(parents=True)
    (root / "etc/haproxy/haproxy.cfg").write_text(f"global\n  stats socket {balancer.socket} level admin\n")
    try:
        async with FakeNetbox(Fleet.of(4)) as netbox, FakeKubernetes() as fake:
            kubeconfig = fake.kubeconfig(etc / "ams.kubeconfig")
            kubeconfig.chmod(0o600)
            (etc / "netbox-token").write_text(V1)
            (etc / "netbox-token").chmod(0o640)
            api = KubernetesApi(kubeconfig)
            await api.open()
            async with ClusterSandbox(api, ready_s=0.3, end_s=0.2) as cluster:
                await cluster.node("k1", {"example.com/team": "web"})
                machine = Machine({"NETBOX_URL": netbox.url, "PATH": os.environ["PATH"]}, root, root, root)
                checks: list[CheckResult] = []
                options = Options(yes=True)
                setup = Setup.start(options, machine, Dialog(options), checks.append, etc / "config.yaml")
                merged = await propose_settings(setup)
            await api.close()
        settings = setup.settings()
        assert [check.text for check in checks if not check.ok] == []
        assert [source.kind for source in settings.inventory] == ["ansible", "kubernetes", "netbox"]
        assert settings.inventory[1].params["labels"] == {"team": "example.com/team"}
        assert set(settings.section("haproxy")) == {"lb1"}
        assert len(merged.nodes) == 2 + 1 + 4
        assert V1 not in setup.text
    finally:
        balancer.stop()


async def test_own_ssh_configuration_is_noted(tmp_path: Path) -> None:
    """The daemon is another user, so what only the caller's configuration says must go to the inventory."""
    (tmp_path / "hosts.yml").write_text(
        "all: {hosts: {n1: {team: t1}, n2: {team: t1, ansible_host: 192.0.2.2}}}\n"
    )
    (tmp_path / ".ssh").mkdir(mode=0o700)
    (tmp_path / ".ssh/config").write_text("Host n1\n  HostName 192.0.2.1\n  ProxyJump gate\n  User deploy\n")
    setup = await propose_here(tmp_path)
    assert setup.settings().ssh.user == "deploy"
    assert setup.notes == [
        "n1: your ssh goes through gate; add ansible_ssh_common_args: '-J gate' to the inventory",
        "n1: your ssh reaches it as 192.0.2.1; set ansible_host to that in the inventory",
    ]


async def test_equal_ssh_differences_are_noted_once(tmp_path: Path) -> None:
    hosts = {f"n{number:02}": {} for number in range(30)}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    (tmp_path / ".ssh/conf.d").mkdir(parents=True, mode=0o700)
    (tmp_path / ".ssh/config").write_text(f"Include {tmp_path}/.ssh/conf.d/*\n")
    (tmp_path / ".ssh/conf.d/gate").write_text("Host n*\n  ProxyJump gate\n")
    setup = await propose_here(tmp_path)
    advice = "add ansible_ssh_common_args: '-J gate' to the inventory"
    assert setup.notes == [
        f"n00, n01, n02, n03, n04 and 15 more: your ssh goes through gate; {advice}",
        "ssh configuration: read for 20 of 30 hosts; compare the others with ssh -G HOST",
    ]


async def propose_here(directory: Path, **environ: str) -> Setup:
    """Return what init proposes where only this directory is searched."""
    machine = Machine({"PATH": os.environ["PATH"], **environ}, directory, directory, directory)
    options = Options(yes=True)
    setup = Setup.start(options, machine, Dialog(options), lambda check: None, directory / "config.yaml")
    await propose_settings(setup)
    return setup


async def test_agent_without_keys_is_not_noted(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("all: {hosts: {n1: {ansible_host: 192.0.2.1}}}\n")
    socket = tmp_path / "agent"
    with subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL) as agent:
        while not socket.exists():
            assert agent.poll() is None
        setup = await propose_here(tmp_path, SSH_AUTH_SOCK=str(socket))
        agent.terminate()
    assert setup.notes == []


async def test_unusable_sources_are_named_and_not_taken(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("all: {hosts: {n1: {team: web}}}\n")
    (tmp_path / "ams.kubeconfig").write_text("bad: [")
    (tmp_path / "lon.kubeconfig").write_text("{current-context: x, contexts: [], clusters: []}")
    for file in tmp_path.glob("*.kubeconfig"):
        file.chmod(0o600)
    (tmp_path / "etc/haproxy").mkdir(parents=True)
    socket = tmp_path / "admin.sock"
    (tmp_path / "etc/haproxy/haproxy.cfg").write_text(f"stats socket {socket} level admin\n")
    setup = await propose_here(tmp_path)
    ams, lon, balancer = setup.not_taken
    assert ams.text == str(tmp_path / "ams.kubeconfig")
    assert ams.reason == "it is not YAML with a current-context; correct it, or move it away"
    assert lon.reason.count("cluster lon") == 1
    assert balancer.reason == f"there is no socket {socket}; start HAProxy, or correct the settings"
    assert [source.kind for source in setup.settings().inventory] == ["ansible"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become the daemon's user")
def test_socket_without_rights_is_reported_for_the_daemon(init: Init, etc: Path) -> None:
    """Root reaches each socket; what counts are the rights of the user who owns the state."""
    balancer = Haproxy(etc / "lb", {"n1": 9}).start()
    (etc / "state").mkdir(mode=0o700)
    os.chown(etc / "state", 65534, 65534)
    try:
        balancer.socket.chmod(0o600)
        answer = first(init, etc, haproxy=[f"lb1={balancer.socket}"])
    finally:
        balancer.stop()
    said = {check["text"] for check in answer["checks"] if check["subject"] == "haproxy lb1"}
    remedy = "add the daemon's user to the socket's group, and restart the daemon"
    assert said == {
        "1 server in 1 backend, level admin",
        f"{balancer.socket}: permission denied; {remedy}",
    }


async def test_token_that_others_may_read_is_refused(etc: Path) -> None:
    async with FakeNetbox(Fleet.of(1)) as netbox:
        (etc / "token").write_text(V1)
        (etc / "token").chmod(0o644)
        options = Options(yes=True, no_search=True, netbox=netbox.url, netbox_token_file=str(etc / "token"))
        machine = Machine({}, etc, etc, etc)
        setup = Setup.start(options, machine, Dialog(options), lambda check: None, etc / "config.yaml")
        await propose_settings(setup)
    [failed] = setup.failed
    assert f"chmod 640 {etc / 'token'}" in failed.text
    assert netbox.requests == [], "the token was not used"


def test_terminal_is_asked_and_may_decline(etc: Path) -> None:
    terminal, inside = pty.openpty()
    options = ["--config", str(etc / "config.yaml"), "--no-search", "--inventory", str(etc / "hosts.yml")]
    command = [sys.executable, "-m", "rolloutd.cli", "init", *options]
    # Observe only, labels, slots of a team, members of infra, db and web, and whether to write.
    answers = ["n", "team", "1", "root", "alice, @web", "-", "n"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=inside, stdout=subprocess.PIPE, stderr=inside, text=True
    ) as asked:
        os.write(terminal, "".join(f"{answer}\n" for answer in answers).encode())
        output, _ = asked.communicate(timeout=LIMIT_S)
    os.close(inside)
    content = b""
    # One read may return only a part; at its end, a terminal that no process has open gives an error.
    with suppress(OSError):
        while chunk := os.read(terminal, 65536):
            content += chunk
    os.close(terminal)
    shown = content.decode()
    assert (asked.returncode, "declined; nothing was written" in shown) == (1, True), shown + output
    assert "+observe_only: false" in output
    assert not (etc / "config.yaml").exists()
