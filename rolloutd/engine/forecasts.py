"""Forecasts: asked of a process of their own, and kept where people have seen them.

The process reads the store by itself (rolloutd/forecast).  The loop never waits for it: a status shows the
latest forecast that has ended.
It does not know what a forecast says but its end and its gates.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import rolloutd
from machines.facts.index import Index
from machines.model.node import NodeHealth
from rolloutd.engine.state import State
from rolloutd.engine.tasks import compute
from rolloutd.errors import Refused, RolloutdError, StoreFailed
from rolloutd.forecast.request import ForecastRequest, TeamChecks
from rolloutd.ports import KeptForecast, load_of, total_parallel

log = logging.getLogger(__name__)

TIME_LIMIT_S = 120.0
"""Time of a forecast that a person waits for, as the API allows a handler; 10,000 nodes take a tenth of it on
an idle core."""

OWN_TIME_LIMIT_S = 600.0
"""Time of one of the daemon's own: it has the lowest priority, so other load prolongs it."""

MAX_WAITING = 8
"""Questions that wait for the one process; a person asks one at a time."""

FIRST_PAUSE_S = 10.0
"""Pause between a change and the forecast that follows: what changes together is forecast together."""

MIN_PAUSE_S = 60.0
"""Pause between two forecasts of the daemon itself."""

BUSY_SHARE = 0.05
"""Share of the time in which the daemon's own forecasts may run, for fleets that take long."""

MAX_AGE_S = 600.0
"""After this time a forecast is made again although nothing has changed: waiting moves the end, too."""

MAX_LOGGED_CHARS = 4_000
"""Of what a failed process printed: the end of a traceback."""

DEFAULT_SEED = 1

Answer = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MissedForecast:
    """A kept forecast whose p90 reality has left; `ends_at` is the end as it is forecast now."""

    kept: KeptForecast
    ends_at: str | None
    waits_for: str


class Forecaster:
    """Asks for forecasts, one at a time, and keeps those of open rollouts up to date."""

    def __init__(
        self,
        state: State,
        on_missed: Callable[[MissedForecast], None] = lambda _: None,
        run: Callable[[bytes, float], Awaitable[Sequence[bytes]]] | None = None,
    ) -> None:
        """`run` answers in place of the process, for a store that no other process can open."""
        self._state = state
        self._run = run or _run
        self._on_missed = on_missed
        self._slot = asyncio.Lock()
        self._waiting = 0

    def request(self, **options: Any) -> ForecastRequest:
        state, settings = self._state, self._state.settings
        teams = {name: TeamChecks(team.checks) for name, team in settings.teams.items()}
        return ForecastRequest(
            settings.state_dir,
            settings.store.postgresql,
            state.index.limits,
            teams,
            tuple(settings.host_class),
            state.now(),
            total_parallel(state.runners),
            load_of(state.runners),
            run_starts(state),
            **options,
        )

    async def ask(self, request: ForecastRequest) -> Sequence[Answer]:
        """Return the forecasts of a request; raises Refused, and StoreFailed where the process fails."""
        if self._waiting >= MAX_WAITING:
            raise Refused("too-many-forecasts", f"forecast: {MAX_WAITING} are waiting; try later")
        self._waiting += 1
        try:
            async with self._slot:
                return await self._make(request, TIME_LIMIT_S)
        finally:
            self._waiting -= 1

    async def _make(self, request: ForecastRequest, limit_s: float) -> Sequence[Answer]:
        not_up = await compute(_not_up, self._state.index.fork())
        content = await compute(pickle.dumps, replace(request, not_up=not_up))
        return await _read_answers(await self._run(content, limit_s))

    async def run(self) -> None:
        """Keep the forecasts of open rollouts up to date, until cancelled."""
        clock, seq, made_at = self._state.clock, -1, 0.0
        with self._state.changes.subscribe() as changed:
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), MAX_AGE_S)
                changed.clear()
                await clock.sleep(FIRST_PAUSE_S)
                latest = self._state.changes.latest_seq
                is_old = clock.now() - made_at >= MAX_AGE_S
                if not self._has_open_rollout() or (latest == seq and not is_old):
                    continue
                began = asyncio.get_running_loop().time()
                await self._refresh()
                seq, made_at = latest, clock.now()
                duration_s = asyncio.get_running_loop().time() - began
                await clock.sleep(max(MIN_PAUSE_S, duration_s / BUSY_SHARE))

    async def keep(self, answer: Answer, occasion: str, made_at: float) -> None:
        """Keep a forecast that people see, so that it can be compared with what comes.

        `made_at` is the instant of its request: the answer has whole seconds, and one second may have two.
        """
        kept = {key: value for key, value in answer.items() if key not in ("changed", "difference")}
        await self._state.store.keep_forecast(KeptForecast(answer["rollout"], made_at, occasion, kept))

    def _has_open_rollout(self) -> bool:
        return any(not each.closed for each in self._state.index.rollouts.values())

    async def _refresh(self) -> None:
        state = self._state
        try:
            request = self.request(seed=DEFAULT_SEED)
            # A person's question does not wait for it.
            made = await self._make(request, OWN_TIME_LIMIT_S)
            state.report_job("forecast", "forecast", "")
            answers = {each["rollout"]: each for each in made}
            previous, state.forecasts = state.forecasts, answers
            state.changes.notify_progress()  # consoles show the figures of a forecast
            for rollout, answer in answers.items():
                await self._keep_for_gates(answer, previous.get(rollout), request.now)
                await self._report_missed(rollout, answer)
        except RolloutdError as error:
            # Nothing depends on it: the status says so, and has the forecast before.
            log.warning("forecast: not made: %s", error)
            state.report_job("forecast", "forecast", str(error).removeprefix("forecast: "))

    async def _keep_for_gates(self, answer: Answer, before: Answer | None, made_at: float) -> None:
        """Keep the first forecast at which a gate waits: it is shown to those who vote."""
        waiting = _waiting_gates(answer)
        if waiting and waiting != (set() if before is None else _waiting_gates(before)):
            await self.keep(answer, f"gate {', '.join(sorted(waiting))}", made_at)

    async def _report_missed(self, rollout: str, answer: Answer) -> None:
        """Report, once for each, the kept forecasts whose p90 is before the end as it is forecast now."""
        for kept in await self._state.store.load_forecasts(rollout):
            promised = kept.answer["ends_at"]["p90"]
            if kept.is_missed or promised is None:
                continue
            ends_at = answer["ends_at"]["p50"]
            if ends_at is None or _instant(ends_at) > _instant(promised):
                await self._state.store.keep_forecast(replace(kept, is_missed=True))
                self._on_missed(MissedForecast(kept, ends_at, next(iter(answer["waits"]), "")))


def _instant(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _waiting_gates(answer: Answer) -> set[str]:
    """Return the gates that ask for votes at the instant of the forecast."""
    return {
        gate["gate"] if gate["wave"] is None else f"{gate['gate']}/{gate['wave']}"
        for gate in answer["gates"]
        if gate["asked_at"]["p50"] is not None
        and _instant(gate["asked_at"]["p50"]) <= _instant(answer["made_at"])
    }


def run_starts(state: State) -> dict[tuple[str, str], float]:
    """Return when the run of each node at work began, without those that wait for a slot of the runner."""
    return {
        key: progress.run.started_at
        for key, progress in state.step_progress.items()
        if progress.run.result is None and progress.run.started_at is not None
    }


def _not_up(index: Index) -> frozenset[str]:
    seen = ((node, index.reported_observation(node)) for node in index.nodes)
    return frozenset(node for node, found in seen if found is None or found.sight is not NodeHealth.UP)


async def _run(content: bytes, limit_s: float) -> Sequence[bytes]:
    """Return the lines that the process prints; raises StoreFailed if it fails or takes too long."""
    search_path = [str(Path(rolloutd.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Files in memory, written and read in threads: through pipes, the 20 MB of a large fleet hold the loop.
    with _memory_file() as request, _memory_file() as answer:
        await compute(_fill, request, content)
        process = await asyncio.create_subprocess_exec(
            # -P: a file of the current directory must not replace a module.
            *(sys.executable, "-P", "-m", "rolloutd.forecast"),
            stdin=request,
            stdout=answer,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path)},
        )
        try:
            async with asyncio.timeout(limit_s):
                _, errors = await process.communicate()
        except TimeoutError:
            action = "ask for fewer draws, or see the daemon's own in rolloutctl status"
            raise StoreFailed(f"forecast: not ready within {limit_s:.0f} s; {action}") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            text = errors.decode(errors="replace")
            log.error("forecast: exit code %s: %s", process.returncode, text[-MAX_LOGGED_CHARS:])
            raise StoreFailed(f"forecast: its process ended with {process.returncode}; see the daemon's log")
        return await compute(_lines_of, answer)


def _memory_file() -> BinaryIO:
    return open(os.memfd_create("forecast"), "w+b")  # noqa: PTH123  # a descriptor has no path


def _fill(file: BinaryIO, content: bytes) -> None:
    file.write(content)
    file.seek(0)


def _lines_of(file: BinaryIO) -> Sequence[bytes]:
    file.seek(0)
    return file.read().splitlines()


async def _read_answers(lines: Sequence[bytes]) -> Sequence[Answer]:
    """Read the process' lines: one for each forecast, each followed by its nodes in slices.

    One at a time, because a line of ten thousand nodes would hold the loop for too long.
    """
    answers: list[dict[str, Any]] = []
    for line in lines:
        read = json.loads(line)
        match read:
            case {"refused": refusal}:
                raise Refused(refusal["code"], refusal["text"])
            case {"error": problem}:
                raise StoreFailed(problem)
            case {"nodes_of": "forecast", "nodes": nodes}:
                answers[-1]["nodes"] += nodes
            case {"nodes_of": "changed", "nodes": nodes}:
                answers[-1]["changed"]["nodes"] += nodes
            case _:
                answers.append(read)
        await asyncio.sleep(0)
    return answers
