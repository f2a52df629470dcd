"""Removal over ssh of what runs and guards left on a node: fences and guards' directories."""

from __future__ import annotations

from collections.abc import Sequence

from rolloutd.adapters.ssh.check import stderr_suffix
from rolloutd.adapters.ssh.node_guard import GUARD_SCRIPT, guard_directory
from rolloutd.adapters.ssh.shell_adapter import run_as_root
from rolloutd.errors import AdapterFailed
from rolloutd.ports import Host, NodeFile, Shell

FENCE_SCRIPT = r"""
dry_run=$1 fence=$2 home_fence=${4:-/}/.rolloutd-fence/$3
for file in "$fence" "$home_fence"; do
    [ -f "$file" ] || continue
    [ -n "$dry_run" ] || rm -f -- "$file" "$file.lock" || exit 1
    echo "fence $file"
done
[ -n "$dry_run" ] || rmdir -- "${home_fence%/*}" 2> /dev/null || :
"""

NEEDED_BY_GUARD = "an armed guard will restore the node"


class SshNodeFiles:
    """ports.NodeFiles; the directories are on the nodes."""

    def __init__(self, shell: Shell, fence_dir: str, guard_dir: str) -> None:
        self._shell = shell
        self._fence_dir = fence_dir
        self._guard_dir = guard_dir

    async def clean(self, host: Host, *, dry_run: bool, timeout_s: float) -> Sequence[NodeFile]:
        flag, directory = "dry-run" if dry_run else "", guard_directory(self._guard_dir, host.name)
        lines = await self._run(host, GUARD_SCRIPT, "clean", directory, "", flag, timeout_s=timeout_s)
        files = [
            NodeFile("guard", path, NEEDED_BY_GUARD if state == "armed" else "")
            for state, _, path in (line.partition(" ") for line in lines)
        ]
        is_armed = any(each.reason for each in files)
        fence = f"{self._fence_dir}/{host.name}"
        lines = await self._run(
            host, FENCE_SCRIPT, "dry-run" if is_armed else flag, fence, host.name, timeout_s=timeout_s
        )
        return files + [
            NodeFile("fence", line.removeprefix("fence "), NEEDED_BY_GUARD if is_armed else "")
            for line in lines
        ]

    async def _run(self, host: Host, script: str, *arguments: str, timeout_s: float) -> list[str]:
        answer = await run_as_root(self._shell, host, script, *arguments, timeout_s=timeout_s)
        lines = answer.stdout.splitlines()
        errors = [line.removeprefix("error ") for line in lines if line.startswith("error ")]
        if answer.exit_status != 0 or errors:
            problem = f": {'; '.join(errors)}" if errors else stderr_suffix(answer)
            raise AdapterFailed(f"{host.name}: what is left is not removed{problem}")
        return lines
