"""End of what older runs do on a node, also those of another machine.

The node first gets a newer token, by which it refuses their further commands; then their processes end.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from rolloutd.adapters.ansible import environment, fence, stale_processes
from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.concurrency import threads
from rolloutd.errors import AdapterFailed
from rolloutd.ports import Failed, Host, Ok, Shell, Unknown

INHERITED_TIMEOUT_S = 60.0
"""Limit of ending another machine's run before the first run here; half of it is its grace period."""

INHERITED_AGE_S = 86_400.0
"""Age that another machine's run may have: playbooks of more than a day do not occur."""

SHARED_TMP = "/var/tmp"  # noqa: S108 - a run makes its own directory there, which nobody else has
"""Where a run that another machine executes has its files on a node: each user there may enter it."""

FENCE_TIMEOUT_S = 45.0
"""Limit of taking the fence: its lock is awaited for 30 s, the rest is a login."""


@dataclass(slots=True)
class OlderRuns:
    """The older runs of all nodes; on `inherited_nodes` those of another machine may be under way."""

    runs_dir: Path
    shell: Shell
    fence_dir: str
    markers: Collection[stale_processes.RunMarkers]
    inherited_nodes: set[str]
    remote_tmp_dirs: set[str] = field(default_factory=lambda: {environment.DEFAULT_REMOTE_TMP, SHARED_TMP})

    async def end_inherited(self, host: Host, token: str) -> None:
        """End what another machine's run does on a node, if it may; raises AdapterFailed."""
        if host.name not in self.inherited_nodes:
            return
        ended = await self.end(host, timeout_s=INHERITED_TIMEOUT_S, token=token)
        if not isinstance(ended, Ok):
            raise AdapterFailed(f"a run that another machine began may be under way: {ended.text}")

    async def end(
        self,
        host: Host,
        *,
        timeout_s: float,
        grace_share: float = stale_processes.GRACE_SHARE,
        token: str = "",
    ) -> Ok | Failed | Unknown:
        """End all processes of runs on the node; with a token, their further commands are refused first."""
        if token:
            refusal = await fence.take(self.shell, host, token, self.fence_dir, timeout_s=FENCE_TIMEOUT_S)
            if refusal is not None:
                return refusal
        remote_tmp = host.connection.get("ansible_remote_tmp")
        result = await stale_processes.end_stale_processes(
            self.shell,
            host,
            {markers.node_token(host.name) for markers in self.markers},
            timeout_s=timeout_s,
            grace_share=grace_share,
            remote_tmp_dirs=tuple(
                sorted(self.remote_tmp_dirs | ({str(remote_tmp)} if remote_tmp else set()))
            ),
            oldest_run_age_s=await threads.RUNS.run(self._oldest_run_age_s, host.name),
        )
        if token and isinstance(result, Ok):
            self.inherited_nodes.discard(host.name)
        return result

    def _oldest_run_age_s(self, node: str) -> float:
        """Return the age of the node's oldest stored run that did not succeed."""
        now = time.time()
        # The directories of another machine's runs are there.
        oldest = now - (INHERITED_AGE_S if node in self.inherited_nodes else 0.0)
        for path in self.runs_dir.iterdir():
            directory = RunDirectory(path)
            metadata = directory.read_metadata()
            if metadata.get("node") == node and metadata.get("began_at"):
                status = directory.read_status()
                if status is None or status.ended != "exit" or status.code != 0:
                    oldest = min(oldest, metadata["began_at"])
        return now - oldest
