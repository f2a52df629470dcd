"""The interpreter of a node: what names one, and what discovery reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolloutd.adapters.ansible.interpreter import InterpreterCache
from rolloutd.ports import Host, ShellResult
from tests.contracts.fakes.shell import FakeShell

FOUND = "/usr/bin/python3.11"


@pytest.mark.parametrize(
    ("file", "text", "resolved"),
    [
        ("ansible.cfg", "[defaults]\ninterpreter_python = /opt/python\n", None),
        ("ansible.cfg", "[defaults]\ninterpreter_python = auto_silent\n", FOUND),
        ("group_vars/all/python.yml", "ansible_python_interpreter: /opt/python\n", None),
        ("host_vars/n1.yml", "ansible_python_interpreter: /opt/python\n", None),
        ("host_vars/n1/python.yml", "ansible_python_interpreter: /opt/python\n", None),
        ("host_vars/n2.yml", "ansible_python_interpreter: /opt/python\n", FOUND),
    ],
)
async def test_named_interpreter_is_not_discovered(
    tmp_path: Path, file: str, text: str, resolved: str | None
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    # The login shell's own files print the first line.
    shell = FakeShell({"/bin/sh -s": ShellResult(0, f"Welcome\n{FOUND}\n", "")})
    assert await InterpreterCache(shell).resolve(Host("n1"), tmp_path, tmp_path / "site.yml") == resolved
