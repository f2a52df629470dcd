"""SSH certificates of a real authority: of hosts, and of the daemon's user."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.errors import HostKeyChanged, NodeUnreachable
from rolloutd.ports import Host
from tests.support.forked_process import ADMIN, run_forked
from tests.support.sshd import Sshd

LIMIT_S = 120.0
ALWAYS, PAST = "always:forever", "20200101:20200102"

pytestmark = pytest.mark.servers


class Authority:
    """A certificate authority: a key, and ssh-keygen."""

    def __init__(self, directory: Path) -> None:
        self.key = directory / "ca"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key], check=True)

    @property
    def public(self) -> str:
        return Path(f"{self.key}.pub").read_text()

    def sign(self, key: Path, principal: str, validity: str, *, host: bool = False) -> None:
        """Write the certificate of a key beside it, in place of an older one."""
        command = ["ssh-keygen", "-q", "-s", self.key, "-I", principal, "-n", principal, "-V", validity]
        subprocess.run([*command, *(["-h"] if host else []), f"{key}.pub"], check=True)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def node(tmp_path: Path, authority: Authority) -> Iterator[Sshd]:
    """A node that trusts the authority for users and no key, and has a certificate itself."""
    directory = tmp_path / "node"
    directory.mkdir(mode=0o700)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / "host_key"], check=True)
    authority.sign(directory / "host_key", "127.0.0.1", ALWAYS, host=True)
    options = f"HostCertificate {directory}/host_key-cert.pub\nTrustedUserCAKeys {authority.key}.pub"
    server = Sshd(options=options).start(directory)
    (directory / "authorized_keys").write_text("")
    (tmp_path / "known_hosts").write_text(f"@cert-authority 127.0.0.1,[127.0.0.1]:* {authority.public}")
    yield server
    server.stop()


async def log_in(node: Sshd, known_hosts: Path) -> None:
    shell = SshShell(known_hosts)
    try:
        done = await shell.run(Host("n1", connection=node.connection()), "true", timeout_s=LIMIT_S)
        assert done.exit_status == 0
    finally:
        await shell.close()


def ssh(node: Sshd, known_hosts: Path) -> int:
    """Log in as Ansible's runs do, by OpenSSH; return its exit code."""
    command = [
        "ssh", "-F", "none", "-o", f"UserKnownHostsFile={known_hosts}", "-o", "BatchMode=yes",
        "-o", "StrictHostKeyChecking=yes", "-o", "GlobalKnownHostsFile=none", "-o", "IdentitiesOnly=yes",
        "-i", str(node.key_file), "-p", str(node.port), f"{node.user}@127.0.0.1", "true",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, timeout=LIMIT_S).returncode


async def test_certificates_of_user_and_host_are_enough(
    node: Sshd, authority: Authority, tmp_path: Path
) -> None:
    """No key of the node is in known_hosts, and none of the user's on the node."""
    known_hosts = tmp_path / "known_hosts"
    authority.sign(node.key_file, node.user, ALWAYS)
    await log_in(node, known_hosts)
    assert ssh(node, known_hosts) == 0
    stranger = Authority(tmp_path / "node")
    known_hosts.write_text(known_hosts.read_text().replace(authority.public, stranger.public))
    with pytest.raises(HostKeyChanged):
        await log_in(node, known_hosts)
    assert ssh(node, known_hosts) == 255


async def test_renewed_user_certificate_is_used_at_once(
    node: Sshd, authority: Authority, tmp_path: Path
) -> None:
    known_hosts = tmp_path / "known_hosts"
    authority.sign(node.key_file, node.user, PAST)
    with pytest.raises(NodeUnreachable, match="authentication refused"):
        await log_in(node, known_hosts)
    assert ssh(node, known_hosts) == 255
    assert "not now; renew it" in doctor(node, tmp_path)
    authority.sign(node.key_file, node.user, "-1h:+8h")
    await log_in(node, known_hosts)
    assert ssh(node, known_hosts) == 0
    assert "client_key-cert.pub is valid until" in doctor(node, tmp_path)


def test_certified_node_needs_no_stored_key(node: Sshd, tmp_path: Path) -> None:
    write_settings(node, tmp_path)
    options = {"config": str(tmp_path / "config.yaml"), "json": True}
    done = run_forked("rolloutd.admin.host_keys.__main__", [json.dumps(options)], timeout_s=LIMIT_S)
    [scanned] = json.loads(done.stdout)["nodes"]
    assert scanned["problem"] == "", done.stderr
    assert (done.returncode, [key["state"] for key in scanned["keys"]]) == (0, ["certified"])


def test_line_of_an_authority_alone_certifies_nothing(tmp_path: Path, authority: Authority) -> None:
    """A node that the line covers, and that has no certificate: no login would work."""
    plain = Sshd().start(tmp_path / "plain")
    try:
        (tmp_path / "known_hosts").write_text(f"@cert-authority 127.0.0.1,[127.0.0.1]:* {authority.public}")
        write_settings(plain, tmp_path)
        options = {"config": str(tmp_path / "config.yaml"), "json": True}
        done = run_forked("rolloutd.admin.host_keys.__main__", [json.dumps(options)], timeout_s=LIMIT_S)
        [scanned] = json.loads(done.stdout)["nodes"]
        assert (done.returncode, [key["state"] for key in scanned["keys"]]) == (1, ["unconfirmed"])
    finally:
        plain.stop()


def doctor(node: Sshd, directory: Path) -> str:
    """Return what the doctor says of ssh."""
    write_settings(node, directory)
    done = run_forked(
        ADMIN, ["doctor", "--json", "--config", str(directory / "config.yaml")], timeout_s=LIMIT_S
    )
    return next(str(each["text"]) for each in json.loads(done.stdout) if each["subject"] == "ssh")


def write_settings(node: Sshd, directory: Path) -> None:
    hosts = {"all": {"hosts": {"n1": {"team": "t1", **node.connection()}}}}
    (directory / "hosts.yml").write_text(yaml.safe_dump(hosts))
    settings = {
        "state_dir": "state",
        "socket": "s",
        "inventory": [{"ansible": {"path": "hosts.yml"}}],
        "ssh": {"known_hosts": "known_hosts", "key_file": str(node.key_file)},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(settings))
