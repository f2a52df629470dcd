"""Other programs of rolloutd: their command lines and environment, and the answers of the admin commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rolloutd
from rolloutd.cli import exits


def run_admin_query(arguments: list[str]) -> dict[str, Any]:
    """Return the JSON that an admin command prints; raises Exit with its exit code if it prints none."""
    command = [*module_command("rolloutd.admin"), *arguments]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if not result.stdout:
        raise exits.Exit(result.returncode, result.stderr.strip())
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def module_command(module: str) -> list[str]:
    return [sys.executable, "-P", "-m", module]


def environment() -> Mapping[str, str]:
    """Return an environment that imports this installation's modules, not the current directory's."""
    search_path = [str(Path(rolloutd.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(search_path), "PYTHONDONTWRITEBYTECODE": "1"}
