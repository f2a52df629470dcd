"""The FleetLock server: two calls, each answered with 200 or with a reason.

200 to `pre-reboot` means that the machine may reboot now: its slot is taken.  Clients take each 2xx for that,
so every wait is a 4xx.  A machine calls again after some minutes; nothing of a call is kept but the hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Final

from aiohttp import web
from pydantic import BaseModel, Field, ValidationError

from machines.model.reasons import ReasonCode
from rolloutd.commands.execution import Events, UserCommand, execute
from rolloutd.commands.self_reboots import (
    Machine,
    RebootRefused,
    give_slot_back,
    machine_with_slot,
    people_with_approval,
    take_slot,
)
from rolloutd.control.identity import AccountLookup, CachedNameService, identify
from rolloutd.control.tcp_listener import TlsFiles, serve_tcp
from rolloutd.engine.state import State
from rolloutd.errors import NotFound, Refused, RolloutdError
from rolloutd.fleetlock.machine_ids import MachineIds
from rolloutd.settings.listeners import GROUP_PATTERN, MAX_GROUP_CHARS, MAX_ID_CHARS, FleetLock

log = logging.getLogger(__name__)

PROTOCOL_HEADER = "fleet-lock-protocol"

MAX_BODY_BYTES = 4096
"""Bytes of a request's body: an id and a group have a few hundred."""

BODY_TIMEOUT_S = 10.0
"""How long a client may take to send its body."""

ANSWER_TIMEOUT_S = 60.0
"""How long a call may take; the slowest observes all nodes of a pool. Clients wait for half an hour."""

MAX_OBSERVING = 8
"""Calls that observe nodes at once; after a power cut all machines come back together."""

KINDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            ReasonCode.POOL_FULL,
            ReasonCode.POOL_CLOSED,
            ReasonCode.POOL_OVER_BUDGET,
            ReasonCode.PEER_DOWN,
            ReasonCode.PEER_UNKNOWN,
        ),
        "lock_held",
    ),
    **dict.fromkeys((ReasonCode.OUTSIDE_WINDOW, ReasonCode.WINDOW_TOO_SHORT), "outside_window"),
    ReasonCode.FREEZE: "frozen",
    ReasonCode.GATE_CLOSED: "gate_closed",
    ReasonCode.ROLLOUT_STOPPED: "rollout_stopped",
    **dict.fromkeys((ReasonCode.NODE_DOWN, ReasonCode.NODE_UNKNOWN), "not_back"),
    **dict.fromkeys(
        (
            ReasonCode.HELD,
            ReasonCode.FOREIGN_LOCK,
            ReasonCode.OTHER_ROLLOUT,
            ReasonCode.PREPARING,
            ReasonCode.CLEANING,
            ReasonCode.RELEASING,
        ),
        "node_in_use",
    ),
}
"""The kind of each reason; clients count kinds in their metrics, so there are few. All others: `not_now`."""

NOT_NOW = "not_now"


class _ClientParams(BaseModel):
    id: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
    group: Annotated[str, Field(max_length=MAX_GROUP_CHARS, pattern=GROUP_PATTERN)]


class _Body(BaseModel):
    client_params: _ClientParams


class _Failure(Exception):
    """An answer that is no success: status, kind for machines, value for people."""

    def __init__(self, status: int, kind: str, value: str) -> None:
        super().__init__(value)
        self.status = status
        self.kind = kind


class FleetLockServer:
    """Answers the calls of machines; `observe` observes nodes now."""

    def __init__(
        self,
        state: State,
        observe: Callable[[Sequence[str]], Awaitable[None]],
        accounts: AccountLookup | None = None,
    ) -> None:
        self._state = state
        self._accounts = accounts or CachedNameService(state.now)
        self._observe = observe
        self._ids = MachineIds(state)
        self._observing = asyncio.Semaphore(MAX_OBSERVING)

    def application(self) -> web.Application:
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._answer)
        return application

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._serve(request)
        except _Failure as failure:
            log.info("%s: %s: %s", request.path, failure.kind, failure)
            response = _json(failure.status, {"kind": failure.kind, "value": str(failure)})
        except TimeoutError:
            text = f"no answer within {ANSWER_TIMEOUT_S:.0f} s; ask again"
            response = _json(503, {"kind": "unavailable", "value": text})
        except ConnectionError:
            response = _json(400, {"kind": "bad_request", "value": "the client has gone"})
        except Exception as error:
            error_id = secrets.token_hex(4)
            log.exception("a request failed", extra={"error_id": error_id})
            known = str(error) if isinstance(error, RolloutdError) else "internal error"
            response = _json(503, {"kind": "unavailable", "value": f"{known} (see the log: {error_id})"})
        else:
            response = _json(200, {})
        # A connection for each call: a machine calls once in some minutes.
        response.force_close()
        return response

    async def _serve(self, request: web.Request) -> None:
        prefix, _, call = request.path.rpartition("/v1/")
        serve = {"pre-reboot": self._lock, "steady-state": self._unlock}.get(call)
        # Some clients join the paths to `//v1/`; a proxy may add a prefix.
        if serve is None or (prefix and not prefix.startswith("/")):
            raise _Failure(404, "unknown_call", "no such call; use /v1/pre-reboot or /v1/steady-state")
        if request.method != "POST":
            raise _Failure(405, "bad_request", f"{request.method}: not allowed; use POST")
        if request.headers.get(PROTOCOL_HEADER, "").strip().lower() != "true":
            raise _Failure(400, "bad_request", f"the header {PROTOCOL_HEADER}: not true; send it")
        params = (await _read_body(request)).client_params
        await serve(params.group, params.id)

    async def _lock(self, group: str, machine_id: str) -> None:
        """Take the machine's slot; observe its pool first if it is unknown whether one is free."""
        machine = await self._machine(group, machine_id)
        await self._look_up_approvers(machine.group)
        try:
            await self._commit(machine, take_slot, "pre-reboot")
            return
        except RebootRefused as refused:
            if not refused.unobserved:
                raise _wait(refused) from None
        async with self._observing:
            try:
                # Another machine of the pool may have had it observed meanwhile.
                await self._commit(machine, take_slot, "pre-reboot")
                return
            except RebootRefused as refused:
                await self._observe(refused.unobserved)
        try:
            await self._commit(machine, take_slot, "pre-reboot")
        except RebootRefused as refused:
            raise _wait(refused) from None

    async def _look_up_approvers(self, group: str) -> None:
        """Let approvals count for the teams that their people have now; raises AccountUnknown.

        Nothing of it is written: an outage of the name service looks as if people had left their teams.
        """
        settings = self._state.settings
        self._state.reboot_approvers[group] = {
            uid: identify(await self._accounts.account(uid), settings.teams, settings.admins).teams
            for uid in people_with_approval(self._state, group)
        }

    async def _unlock(self, group: str, machine_id: str) -> None:
        """Give the machine's slot back once the node is seen well; success for one that has none."""
        machine = machine_with_slot(self._state, group, machine_id)
        if machine is None:
            return
        # Its last observation may be from before the reboot.
        async with self._observing:
            await self._observe((machine.node,))
        try:
            await self._commit(machine, give_slot_back, "steady-state")
        except RebootRefused as refused:
            raise _wait(refused) from None

    async def _machine(self, group: str, machine_id: str) -> Machine:
        settings = self._state.settings.fleetlock
        known = settings.groups.get(group) if settings is not None else None
        if known is None:
            raise _Failure(404, "unknown_group", f"group {group}: not in the settings; add it there")
        try:
            return Machine(group, machine_id, await self._ids.node(group, known, machine_id))
        except NotFound as unknown:
            raise _Failure(404, "unknown_node", str(unknown)) from None

    async def _commit(self, machine: Machine, decide: Callable[[State, Machine], Events], call: str) -> None:
        # Judged and written under one lock: of all who ask at once, no more get a slot than there are.
        try:
            await execute(self._state, machine, UserCommand(f"fleetlock: {call} of {machine.id}", decide))
        except RebootRefused:
            raise
        except Refused as refused:
            raise _wait(refused) from None


async def run_fleetlock(state: State, observe: Callable[[Sequence[str]], Awaitable[None]]) -> None:
    """Serve until cancelled; a failure to listen is shown in the daemon's status."""
    settings = state.settings.fleetlock
    assert settings is not None
    try:
        async with serve_fleetlock(FleetLockServer(state, observe), settings):
            log.info("fleetlock: served at %s", settings.listen)
            await asyncio.Event().wait()
    except (RolloutdError, OSError) as error:
        state.conditions["fleetlock"] = f"fleetlock: not served: {error}"
        log.error("fleetlock: not served: %s", error)


@contextlib.asynccontextmanager
async def serve_fleetlock(server: FleetLockServer, settings: FleetLock) -> AsyncIterator[None]:
    """Listen while the context is open; raises CannotListen."""
    tls = settings.tls
    files = None if tls is None else TlsFiles(tls.cert, tls.key, tls.client_ca)
    async with serve_tcp(server.application(), settings.listen, "fleetlock", files):
        yield


async def _read_body(request: web.Request) -> _Body:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            raw = await request.read()
        return _Body.model_validate_json(raw)
    except web.HTTPRequestEntityTooLarge:
        raise _Failure(413, "bad_request", f"the body: more than {MAX_BODY_BYTES} bytes; send less") from None
    except TimeoutError:
        raise _Failure(408, "bad_request", f"the body: not received in {BODY_TIMEOUT_S:.0f} s") from None
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(each) for each in first["loc"]) or "the body"
        raise _Failure(400, "bad_request", f"{where}: {first['msg']}; send client_params") from None


def _wait(refused: Refused) -> _Failure:
    return _Failure(423, KINDS.get(refused.code, NOT_NOW), refused.text)


def _json(status: int, body: Mapping[str, str]) -> web.Response:
    return web.Response(
        status=status, body=json.dumps(body).encode(), content_type="application/json", charset="utf-8"
    )
