"""The playbooks of the example plans: killed after each task, they still end as if they had not been."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.docs.example_previews import EXAMPLES
from tests.support.playbook_node import Node

RENEW = """#!/bin/sh
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 -subj /CN=new \\
    -keyout "$1/web.key" -out "$1/web.pem" 2>/dev/null
"""


def add_playbooks(node: Node, example: str) -> None:
    shutil.copytree(EXAMPLES / example / "tree", node.tree, dirs_exist_ok=True)


@pytest.fixture
def certificate(node: Node) -> dict[str, Any]:
    """The variables of a certificate that ends tomorrow."""
    add_playbooks(node, "certificate")
    ssl = node.directory / "ssl"
    ssl.mkdir()
    (node.directory / "renew").write_text(RENEW)
    (node.directory / "renew").chmod(0o755)
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=old -keyout web.key -out web.pem"
    subprocess.run(command.split(), cwd=ssl, check=True, capture_output=True)
    (ssl / "web.key").chmod(0o640)
    return {
        "certificate_file": str(ssl / "web.pem"),
        "certificate_key_file": str(ssl / "web.key"),
        "certificate_renew": [str(node.directory / "renew"), str(ssl)],
        "certificate_services": ["nginx"],
        "certificate_backups": str(node.directory / "backups"),
        "systemctl_command": str(node.directory / "systemctl"),
    }


def contents(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {file.name: (file.read_bytes(), file.stat().st_mode & 0o777) for file in directory.iterdir()}


@pytest.mark.long
async def test_certificate_killed_after_each_task_is_renewed(node: Node, certificate: dict[str, Any]) -> None:
    before = contents(node.directory / "ssl")
    assert "Say that the certificate must be renewed" in await node.check("certificate.yml", **certificate)
    assert "ends within 30 days" in await node.fail("certificate-verify.yml", **certificate)
    assert await node.play_killed("certificate.yml", **certificate) >= 3
    await node.play("certificate-verify.yml", **certificate)
    assert await node.check("certificate.yml", **certificate) == []
    assert await node.play_killed("certificate-undo.yml", **certificate) >= 2
    assert contents(node.directory / "ssl") == before
    assert not list((node.directory / "backups").iterdir())
    assert await node.play("certificate-undo.yml", **certificate) == 0


@pytest.mark.long
async def test_release_killed_after_each_task_is_switched(node: Node) -> None:
    add_playbooks(node, "release")
    old, new, link = (node.directory / name for name in ("app-1.3.0", "app-1.4.0", "current"))
    old.touch()
    new.touch()
    link.symlink_to(old)
    (node.services / "app").touch()
    variables = {
        "release_file": str(new),
        "release_version": "1.4.0",
        "release_link": str(link),
        "release_record": str(node.directory / "release.json"),
        "service": "app",
        "restart_token": "app-1.4.0",
        "restart_state_dir": str(node.directory / "restarts"),
        "systemctl_command": str(node.directory / "systemctl"),
    }
    assert await node.play_killed("release.yml", **variables) >= 3
    assert link.readlink() == new
    assert "restart app" in (node.services / "log").read_text()
    assert await node.play("release.yml", **variables) == 0
    assert await node.play_killed("release-undo.yml", **variables) >= 3
    assert link.readlink() == old
    assert not (node.directory / "release.json").exists()
