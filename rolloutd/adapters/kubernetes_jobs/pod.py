"""Program of a runner pod: one run, by the runner of the machine that the pod is.

The pod first creates a claim exclusively: a container that is started a second time in the same pod stops.
The node's fence then has the pod's uid as holder, so a second pod of one run is refused by the node.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import shutil
import signal
import ssl
import sys
import tarfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from machines.model.rollout import FailureCode
from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.adapters.ansible.runner import AnsibleRunner
from rolloutd.adapters.kubernetes_jobs.report import ESSENTIAL_KINDS, MAX_LOG_BYTES, PodResult, numbered_line
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.concurrency import threads
from rolloutd.errors import AdapterFailed, RolloutdError
from rolloutd.ports import Failed, Host, InventorySnapshot, PinnedSource, RunRequest, RunState, Unknown

EXIT_CLAIMED = 75
"""Exit status of a container that finds the pod's run begun already."""

FETCH_TRIES = 60
FETCH_PAUSE_S = 5.0
"""The daemon may be restarted meanwhile: five minutes of tries."""

MAX_TREE_BYTES = 256 * 1024 * 1024
"""Limit of a packed tree; an upload has at most 64 MiB."""

FOLLOW_S = 0.2
"""Interval of looking for new events of the run."""


def main() -> None:
    work, given = Path(os.environ["ROLLOUTD_WORK"]), Path(os.environ["ROLLOUTD_GIVEN"])
    try:
        os.close(os.open(work / "claim", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        print("this pod has begun its run before; nothing is started", file=sys.stderr)  # noqa: T201
        sys.exit(EXIT_CLAIMED)
    os.environ["HOME"] = str(work)
    spec = json.loads((given / "run.json").read_text())
    asyncio.run(_run(spec, work, given, os.environ["ROLLOUTD_POD"], Path(os.environ["ROLLOUTD_MESSAGE"])))


async def _run(spec: Mapping[str, Any], work: Path, given: Path, holder: str, message: Path) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    lines = _Lines()
    try:
        tree = await threads.FILES.run(_fetch_tree, spec, work, given, stopping.is_set)
        state = await _execute(spec, work, given, holder, tree, lines, stopping)
        result = state.result or Unknown("the run has no result")
    except (RolloutdError, OSError, ValueError, HTTPException) as error:
        result = Failed(f"the pod could not begin the run: {error}", code=FailureCode.NEVER_STARTED)
    content = PodResult.of(spec["run"], holder, lines.number, result).message()
    await threads.FILES.run(message.write_text, content)


async def _execute(
    spec: Mapping[str, Any],
    work: Path,
    given: Path,
    holder: str,
    tree: Path,
    lines: _Lines,
    stopping: asyncio.Event,
) -> RunState:
    known_hosts, key = _own_copy(given / "known_hosts", work), _own_copy(given / "key", work)
    node, hosts = spec["node"], {spec["node"]: spec["variables_of_node"]}
    shell = SshShell(known_hosts, spec["user"], key)
    runner = AnsibleRunner(
        work / "runs",
        shell,
        lambda source: tree,
        lambda: InventorySnapshot(hosts, spec["groups"]),
        fence_dir=spec["fence_dir"],
        parallel=1,
        warm=False,
        pipelining=spec["pipelining"],
        known_hosts=known_hosts,
        user=spec["user"],
        key_file=key,
        marks=spec["marks"],
    )
    request = RunRequest(
        # The name of the run's directory is the holder of the node's fence.
        f"{spec['name']}:{holder}",
        Host(node, connection=hosts[node]),
        PinnedSource("tree", tree.name),
        spec["playbook"],
        variables=spec["variables"],
        timeout_s=spec["timeout_s"],
        fencing_token=spec["fencing_token"],
        check_only=spec["check_only"],
        rollout=spec["rollout"],
        attempt=spec["attempt"],
        step=spec["step"],
    )
    try:
        handle = await runner.start(request)
        directory, offset = RunDirectory(work / "runs" / handle), 0
        while True:
            if stopping.is_set():
                with suppress(RolloutdError):
                    await runner.cancel(handle)
            state = await runner.get_state(handle)
            for line in directory.read_events(offset):
                lines.write(line.event)
                offset = line.offset
            if state.result is not None and directory.events_size() <= offset:
                return state
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), FOLLOW_S)
    finally:
        await runner.close()
        await shell.close()


class _Lines:
    """The numbered lines that were written."""

    def __init__(self) -> None:
        self.number = self._size = 0

    def write(self, event: Mapping[str, Any]) -> None:
        if self._size > MAX_LOG_BYTES and event.get("kind") not in ESSENTIAL_KINDS:
            return
        self.number += 1
        line = numbered_line(self.number, event)
        self._size += len(line) + 1
        print(line, flush=True)  # noqa: T201  # the pod's log is how the daemon reads it
        if self._size > MAX_LOG_BYTES >= self._size - len(line) - 1:
            self.write(
                {"at": time.time(), "kind": "log", "text": "the log is full; later results are left out"}
            )


def _own_copy(path: Path, work: Path) -> Path | None:
    """Copy a given file, which its group can read, to one that ssh accepts; None if it was not given."""
    if not path.exists():
        return None
    copy = work / path.name
    with os.fdopen(os.open(copy, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
        file.write(path.read_bytes())
    return copy


def _fetch_tree(spec: Mapping[str, Any], work: Path, given: Path, is_stopping: Callable[[], bool]) -> Path:
    """Fetch and unpack the tree; the daemon is asked again while it does not answer with all of it."""
    ca = given / "ca.crt"
    context = ssl.create_default_context(cafile=str(ca)) if ca.exists() else None
    for left in range(FETCH_TRIES, 0, -1):
        if is_stopping():
            raise AdapterFailed("it was cancelled before")
        try:
            with urllib.request.urlopen(spec["tree_url"], timeout=60.0, context=context) as answer:  # noqa: S310
                packed: bytes = answer.read(MAX_TREE_BYTES + 1)
            # A daemon that ends cuts its answer, which the length alone need not show.
            if hashlib.sha256(packed).hexdigest() != spec["tree_sha256"]:
                raise ValueError("the source tree is not the one that the run names")
            break
        except (OSError, ValueError, HTTPException):
            if left == 1:
                raise
            time.sleep(FETCH_PAUSE_S)
    if is_stopping():
        raise AdapterFailed("it was cancelled before")
    tree = work / "trees" / str(spec["tree_sha256"])
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(tree)  # noqa: S202  # packed by the daemon, by its hash
    return tree


if __name__ == "__main__":
    main()
