"""Contexts and a local shell for contract suites and their backends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from rolloutd.ports import JSON, Clock, Host, ShellResult, StepContext

STEP_TIMEOUT_S = 60.0
"""Limit of one step of a suite, on a loaded machine."""


class LocalShell:
    """ports.Shell that runs every command on this machine: each host is this machine."""

    async def run(self, host: Host, command: str, *, timeout_s: float, stdin: str = "") -> ShellResult:
        """Run a shell command; raises TimeoutError."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_shell(command, stdin=pipe, stdout=pipe, stderr=pipe)
        try:
            async with asyncio.timeout(timeout_s):
                stdout, stderr = await process.communicate(stdin.encode())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return ShellResult(process.returncode or 0, stdout.decode(), stderr.decode())

    async def disconnect(self, node: str) -> None:
        """Do nothing; the fake has no connection."""

    async def close(self) -> None:
        """Do nothing; the fake has no connection."""


def step_context(host: Host, params: Mapping[str, JSON], clock: Clock, *, prior: JSON = None) -> StepContext:
    """Return the context of a step, as the daemon hands it to an adapter."""
    return StepContext(
        host=host,
        rollout="r1",
        attempt=1,
        step="step",
        idempotency_key=f"r1/{host.name}/1/step",
        params=params,
        deadline=clock.now() + STEP_TIMEOUT_S,
        prior=prior,
    )


def scenario(test: Callable[[Any, Any], Awaitable[None]]) -> Callable[[Any, Path], None]:
    """Make a pytest test of a coroutine: open a backend, run, close, in one event loop."""

    @wraps(test)
    def run(self: Any, tmp_path: Path) -> None:
        async def run_with_backend() -> None:
            async with self.open_backend(tmp_path) as backend:
                await test(self, backend)

        asyncio.run(run_with_backend())

    # pytest requests fixtures by this signature, so it must show `tmp_path`, not `backend`.
    del run.__wrapped__
    return run
