"""Comparison over ssh of the files that stages brought to a node; the node remembers what was whole."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from rolloutd.adapters.ssh.check import stderr_suffix
from rolloutd.adapters.ssh.shell_adapter import read_node_script, run_as_root
from rolloutd.errors import AdapterFailed
from rolloutd.ports import Host, Shell, StagedFile

MAX_DIFFERENCES = 100
"""Differences that one command prints: a stage with one of them inspects all of its files anyway."""

_SCRIPT = read_node_script("staging.sh")


class SshStagedFiles:
    """ports.StagedFiles over the daemon's ssh connections."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    async def compare(
        self, host: Host, files: Sequence[StagedFile], *, timeout_s: float
    ) -> Mapping[str, str]:
        # In the script and not as arguments, because a thousand paths are too long for a command line.
        calls = "\n".join(_call(number, file) for number, file in enumerate(files))
        script = f"compare_all() {{\n:\n{calls}\n}}\n{_SCRIPT}"
        arguments = ("compare", str(MAX_DIFFERENCES))
        answer = await run_as_root(self._shell, host, script, *arguments, timeout_s=timeout_s)
        lines = answer.stdout.splitlines()
        if not lines or lines[-1] != "compared":
            problem = stderr_suffix(answer) or f": it ended with {answer.exit_status}"
            raise AdapterFailed(f"{host.name}: its staged files are not compared{problem}; check its sh")
        return dict(_difference(files, line) for line in lines[:-1])


def _call(number: int, file: StagedFile) -> str:
    return shlex.join(["compare", str(number), str(file.size), file.path, file.unpacked])


def _difference(files: Sequence[StagedFile], line: str) -> tuple[str, str]:
    number, _, problem = line.partition(" ")
    file = files[int(number)]
    match problem.split():
        case ["missing"]:
            text = "is missing"
        case ["link"]:
            text = "is a symbolic link"
        case ["not-regular"]:
            text = "is not a regular file"
        case ["not-unpacked"]:
            text = "is not unpacked any more"
        case ["size", size]:
            text = f"has {size} bytes, not {file.size}"
        case ["digest", found]:
            text = f"is altered: sha256 {found}, not {file.sha256}"
        case _:
            text = "cannot be read"
    return file.path, text
