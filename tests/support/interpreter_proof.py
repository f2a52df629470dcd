"""Proof that this Python runs rolloutd: its programs start, and fast runs are as plain ones.

python -m tests.support.interpreter_proof
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from rolloutd.adapters.ansible import self_test
from rolloutd.adapters.ansible.fast.fast_runs import TESTED_VERSIONS
from rolloutd.adapters.ssh.shell import SshShell

PROGRAMS = ("rolloutd.app", "rolloutd.admin.__main__", "rolloutd.cli.main", "tui.app")
"""Modules that import nearly all others."""


def main() -> int:
    """Print a line; return 1 if the Python is not proven."""
    for name in PROGRAMS:
        importlib.import_module(name)
    version = metadata.version("ansible-core")
    problem = "" if version in TESTED_VERSIONS else "it is not in TESTED_VERSIONS"
    with tempfile.TemporaryDirectory() as directory:
        problem = problem or asyncio.run(self_test.run(Path(directory), SshShell(None)))
    result = problem or "fast and plain runs are the same"
    print(f"Python {sys.version.split()[0]}, ansible-core {version}: {result}")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
