"""Fuzz target of inventories' values: from a source to what a run of Ansible templates.

It keeps a canary: a file that the templates of the seeds would make on this machine.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.fuzz.engine import Consumer, encoded

ROOT = Path(__file__).parents[2]

ANSWER_LIMIT_S = 60.0
"""An input takes some milliseconds."""

MAX_ANSWER_BYTES = 1024 * 1024
"""A traceback quotes its input."""

ATTACKS = (
    "{{ lookup('pipe', 'touch canary') }}",
    "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
    "{% set x = lookup('pipe', 'touch canary') %}{{ x }}",
    "#jinja2: variable_start_string:'<<', variable_end_string:'>>'\n<< lookup('pipe', 'touch canary') >>",
    "{{ '{{' }} lookup('pipe', 'touch canary') {{ '}}' }}",
)


def _unsafe(text: str) -> dict[str, str]:
    return {"__ansible_unsafe": text}


VALUES = encoded(
    *(
        {
            "_meta": {
                "hostvars": {
                    "n1": {
                        "ansible_host": _unsafe("10.0.0.1"),
                        "team": _unsafe(attack),
                        "tags": {"my-tag": [_unsafe(attack), {attack: _unsafe(attack)}], "size": 3},
                        "ansible_remote_tmp": _unsafe(attack),
                        "ansible_ssh_common_args": _unsafe(f"-o x={attack}"),
                        "my-tag": _unsafe(attack),
                    },
                    "n2": {
                        "ansible_host": "fe80::1%eth0",
                        "ansible_port": 22,
                        "team": "infra",
                        "provider_id": _unsafe(attack),
                        "machine_id": {"nested": {"deeper": [[_unsafe(attack)], None, 1.5, True]}},
                        "secret": {"__ansible_vault": "$ANSIBLE_VAULT;1.1;AES256\n3132\n"},
                        "ansible_python_interpreter": _unsafe(f"/usr/bin/{attack}"),
                    },
                }
            },
            "all": {"children": ["web"]},
            "web": {"hosts": ["n1", "n2"]},
        }
        for attack in ATTACKS
    )
)


@asynccontextmanager
async def inventory_values(directory: Path) -> AsyncIterator[Consumer]:
    """Read a listing as `ansible` does, and take each of its nodes for another source's too.

    Ansible changes the process that imports it, so it has one of its own.
    """
    reader = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fuzz.inventory_reader", str(directory)),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        limit=MAX_ANSWER_BYTES,
    )
    assert reader.stdin
    assert reader.stdout

    async def consumer(data: bytes) -> None:
        assert reader.stdin
        assert reader.stdout
        reader.stdin.write(json.dumps(data.hex()).encode() + b"\n")
        async with asyncio.timeout(ANSWER_LIMIT_S):
            problem = json.loads(await reader.stdout.readline())
        assert not problem, problem
        assert not (directory / "canary").exists()

    try:
        yield consumer
    finally:
        reader.stdin.close()
        await reader.wait()
