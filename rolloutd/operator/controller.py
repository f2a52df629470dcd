"""The controller: objects become rollouts by the command of `rolloutctl submit`, and show their status.

An object that is removed ends its rollout: no node of it starts again, those in flight finish.  Which rollout
an object has is in the rollout's submitter, so a restart needs no memory of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from machines.model.rollout import Rollout
from machines.model.timefmt import format_rfc3339
from rolloutd import planfile
from rolloutd.adapters.kubernetes.api_errors import ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import FIELD_MANAGER, Cluster, api_path
from rolloutd.adapters.kubernetes.list_watch import WatchHandler, run_list_watch
from rolloutd.adapters.kubernetes.object_events import ObjectEvent, write_event
from rolloutd.commands import rollout_commands, submit
from rolloutd.commands.execution import UserCommand, execute
from rolloutd.commands.resolve import MAX_CLOSED, ResolvedRollout, resolve_rollout
from rolloutd.concurrency import threads
from rolloutd.control.kept_answers import KeptAnswers
from rolloutd.control.nodes import node_serializers
from rolloutd.control.rollouts import serializers
from rolloutd.control.rollouts.coverage import coverage_of
from rolloutd.engine.state import State
from rolloutd.errors import NotFound, Refused, RolloutdError, SourceFailed
from rolloutd.operator.objects import (
    APPLY_PATCH,
    GROUP_VERSION,
    KIND,
    MAX_ITEMS,
    RESOURCE,
    Refusal,
    RolloutObject,
    parse_object,
    refusal_of,
    status_of,
    transitions,
)
from rolloutd.operator.people import ClusterPrincipal, submitter, submitter_prefix
from rolloutd.planfile.document import MAX_BYTES
from rolloutd.ports import JSON, SourceStore
from rolloutd.settings.operator import Operator

log = logging.getLogger(__name__)

STATUS_INTERVAL_S = 5.0
"""Shortest time between two writes of one object's status."""

REFRESH_S = 30.0
"""How often each status is computed although no event came: windows open and soaks end by time alone."""

COALESCE_S = 1.0
"""Events within this time are one pass over the objects."""

RETRY_S = 60.0
"""When an object that was refused is submitted again: the inventory or the settings may allow it by then."""

REMOVED = "its object was removed"


@dataclass(slots=True)
class _Known:
    """An object, its rollout if it has one, and when to act on it next (monotonic seconds).

    `is_new`: an earlier daemon has made no rollout of it.
    """

    obj: RolloutObject
    rollout: str = ""
    is_new: bool = False
    refusal: Refusal | None = None
    submit_at: float = 0.0
    write_at: float = 0.0


class NamespaceWatch(WatchHandler):
    """The objects of one namespace, as the server has them."""

    def __init__(self, namespace: str, controller: Controller) -> None:
        self.namespace = namespace
        self.synced = False
        self.objects: dict[str, RolloutObject] = {}
        self._controller = controller

    def parse(self, obj: Mapping[str, JSON]) -> RolloutObject:
        return parse_object(obj)

    def on_list(self, objects: Sequence[RolloutObject]) -> None:
        self.objects = {each.uid: each for each in objects}
        self.synced = True
        self._controller.wake_up()

    def on_event(self, kind: str, obj: Mapping[str, JSON]) -> None:
        parsed = parse_object(obj)
        if kind == "DELETED":
            self.objects.pop(parsed.uid, None)
        else:
            self.objects[parsed.uid] = parsed
        self._controller.wake_up()

    def on_connected(self) -> None:
        self._controller.report(self.namespace, "")

    def on_disconnected(self, reason: str) -> None:
        self._controller.report(self.namespace, reason)


@dataclass(slots=True)
class Controller:
    """Keeps the rollouts of a cluster's objects and the objects' statuses in step, until cancelled."""

    state: State
    sources: SourceStore
    cluster: Cluster
    settings: Operator
    monotonic: Callable[[], float] = time.monotonic
    _known: dict[str, _Known] = field(default_factory=dict)
    _kept: KeptAnswers = field(default_factory=KeptAnswers)
    _woken: asyncio.Event = field(default_factory=asyncio.Event)
    _has_due: asyncio.Event = field(default_factory=asyncio.Event)

    def wake_up(self) -> None:
        self._woken.set()

    def report(self, namespace: str, problem: str) -> None:
        """Show in the daemon's status that a namespace cannot be read."""
        key = f"operator {namespace}"
        if problem:
            self.state.conditions[key] = f"operator: {namespace}: {problem}"
        else:
            self.state.conditions.pop(key, None)

    async def run(self) -> None:
        watches = [NamespaceWatch(namespace, self) for namespace in self.settings.namespaces]

        def on_commit(*_: object) -> None:
            self.wake_up()

        self.state.commit_listeners.append(on_commit)
        try:
            async with asyncio.TaskGroup() as tasks:
                for watch in watches:
                    path = api_path(RESOURCE, namespace=watch.namespace, group=GROUP_VERSION)
                    tasks.create_task(run_list_watch(self.cluster, path, {}, watch))
                tasks.create_task(self._pass_for_ever(watches))
                tasks.create_task(self._submit_for_ever())
        finally:
            self.state.commit_listeners.remove(on_commit)

    async def _pass_for_ever(self, watches: Sequence[NamespaceWatch]) -> None:
        while True:
            self._woken.clear()
            try:
                next_s = await self.pass_over(watches)
            except (RolloutdError, TimeoutError) as error:
                # The store or the cluster does not answer: everything is found again in the next pass.
                log.warning("objects were not looked at: %s", error)
                next_s = REFRESH_S
            try:
                async with asyncio.timeout(next_s):
                    await self._woken.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(COALESCE_S)

    async def _submit_for_ever(self) -> None:
        # In a task of its own: a git server that hangs must delay no removal and no status.
        while True:
            await self._has_due.wait()
            self._has_due.clear()
            await self.submit_due()

    async def submit_due(self) -> None:
        """Find the rollouts of the objects whose turn it is, and submit those without, one by one."""
        due = [known for known in self._known.values() if self._is_due(known)]
        # All are found first: after a start, a git server that hangs must delay no status of a rollout.
        for act in (self._find_rollout, self._submit):
            for known in filter(self._has_none, due):
                known.submit_at = self.monotonic() + RETRY_S
                try:
                    await act(known)
                except Exception:
                    # One object must not keep the others from being submitted, nor end the daemon.
                    name = f"{known.obj.namespace}/{known.obj.name}"
                    log.exception("%s: not submitted; it is tried again", name)
                self.wake_up()

    def _has_none(self, known: _Known) -> bool:
        """Return whether an object that is still there has no rollout."""
        is_there = self._known.get(known.obj.uid) is known and not known.obj.is_being_removed
        return is_there and not known.rollout

    def _is_due(self, known: _Known) -> bool:
        return self._has_none(known) and self.monotonic() >= known.submit_at

    async def pass_over(self, watches: Sequence[NamespaceWatch]) -> float:
        """Act on each object, and return in how many seconds the next pass is due."""
        present = {uid: obj for watch in watches for uid, obj in watch.objects.items()}
        if all(watch.synced for watch in watches):
            await self._cancel_removed(present)
        for uid in [uid for uid in self._known if uid not in present]:
            del self._known[uid]
        next_at = [REFRESH_S]
        for uid, obj in present.items():
            known = self._known.setdefault(uid, _Known(obj))
            known.obj = obj
            if self._is_due(known):
                self._has_due.set()
            try:
                next_at.append(await self._write_status(known) - self.monotonic())
            except Exception:
                # One object must not keep the others from being read, nor end the daemon.
                log.exception("%s/%s: not read; it is tried again", obj.namespace, obj.name)
        return max(COALESCE_S, min(next_at))

    # -- rollouts

    def _submitter_of(self, obj: RolloutObject) -> ClusterPrincipal:
        teams = frozenset(self.settings.namespaces.get(obj.namespace, ()))
        return submitter(self.cluster.name, obj, teams)

    async def _find_rollout(self, known: _Known) -> None:
        who = self._submitter_of(known.obj)
        found = await self._rollout_of(who.user) or await self._rollout_in_status(known.obj, who.teams)
        known.rollout, known.is_new = found or "", found is None

    async def _submit(self, known: _Known) -> None:
        if not known.is_new:
            return  # it could not be searched
        obj, who = known.obj, self._submitter_of(known.obj)
        try:
            content, name = await self._plan_content(obj)
            plan_file = await threads.COMPUTATIONS.run(planfile.read, content, name)
            owner = plan_file.content["metadata"]["owner"]
            if owner in self.state.settings.teams:
                rollout_commands.require_member(who, owner, f"submit a plan of {owner}")
            submitted = await submit.submit(
                self.state, self.sources, plan_file, None, who, supersede=obj.supersede
            )
            self._require_no_other_object(submitted.rollout, who.user)
            known.rollout, known.refusal = submitted.rollout, None
            log.info("%s/%s: rollout %s", obj.namespace, obj.name, known.rollout)
        except (RolloutdError, TimeoutError) as error:
            refusal = refusal_of(error)
            if refusal != known.refusal:
                log.warning("%s/%s: %s", obj.namespace, obj.name, refusal.message)
            known.refusal = refusal

    def _require_no_other_object(self, rollout: str, own_submitter: str) -> None:
        """Raise Refused if the plan's rollout is that of another object, whose removal would end it."""
        found, prefix = self.state.index.rollouts.get(rollout), submitter_prefix(self.cluster.name)
        name = own_submitter if found is None else found.submitted_by.name
        if name != own_submitter and name.startswith(prefix):
            other = name.removeprefix(prefix).rpartition("/")[0]
            text = f"{rollout} has this plan already, as object {other}; remove one of both"
            raise Refused("same-plan", text)

    async def _plan_content(self, obj: RolloutObject) -> tuple[bytes, str]:
        if obj.plan is not None:
            return obj.plan.encode(), f"{obj.namespace}/{obj.name}"
        if obj.source is None:
            raise SourceFailed(f"{obj.namespace}/{obj.name}: neither plan nor source; give one")
        pinned = await self.sources.pin_git(obj.source["git"], obj.source["ref"])
        tree, path = self.sources.tree_path(pinned), obj.source["path"]
        return await threads.FILES.run(partial(_read_within, tree, path)), path

    async def _rollout_of(self, submitter_name: str) -> str | None:
        """Return the rollout that an object has submitted, also before this daemon's start."""
        for each in self.state.index.rollouts.values():
            if each.submitted_by.name == submitter_name:
                return each.id
        closed = await self.state.store.list_closed_rollouts(MAX_CLOSED)
        return next((each.id for each in closed if each.submitted_by.name == submitter_name), None)

    async def _rollout_in_status(self, obj: RolloutObject, teams: Collection[str]) -> str | None:
        """Return the rollout that the object had: that of a person, or one whose records are removed."""
        named = obj.status.get("rollout")
        if not isinstance(named, str) or not named:
            return None
        try:
            found = (await resolve_rollout(self.state, named)).rollout
        except (NotFound, Refused):
            return named
        # A status may be edited: it shows no rollout that the namespace may not submit.
        return named if found.id == named and found.plan.owner in teams else None

    async def _cancel_removed(self, present: Mapping[str, RolloutObject]) -> None:
        prefix = submitter_prefix(self.cluster.name)
        for each in tuple(self.state.index.rollouts.values()):
            name = each.submitted_by.name
            if not name.startswith(prefix) or each.closed or name.rpartition("/")[2] in present:
                continue
            # What is in a namespace that the settings no longer name is not seen: it may be there.
            if name.removeprefix(prefix).partition("/")[0] in self.settings.namespaces:
                await self._cancel(each)

    async def _cancel(self, rollout: Rollout) -> None:
        cancel = partial(rollout_commands.cancel_own, reason=REMOVED)
        resolved = ResolvedRollout(self.state.index, rollout, live=True)
        command = UserCommand(f"cancel: {REMOVED}", cancel, resolved)
        who = ClusterPrincipal(rollout.submitted_by.name, rollout.submitted_by, frozenset())
        if not (await execute(self.state, who, command)).events:
            return
        log.info("%s: cancelled, because %s", rollout.id, REMOVED)

    # -- status

    async def _write_status(self, known: _Known) -> float:
        """Write an object's status if it differs; return when to look again (monotonic seconds)."""
        if self.monotonic() < known.write_at:
            return known.write_at
        if not (known.rollout or known.is_new):
            # Its status may name its rollout, and a restart finds a deleted one only there.
            return self.monotonic() + REFRESH_S
        wanted = await self._status(known)
        if wanted == known.obj.status:
            if known.rollout and known.rollout not in self.state.index.rollouts:
                # It was read from the store, and no event changes it: not with each of them.
                known.write_at = self.monotonic() + REFRESH_S
            return self.monotonic() + REFRESH_S
        known.write_at = self.monotonic() + STATUS_INTERVAL_S
        obj = known.obj
        metadata = {"name": obj.name, "namespace": obj.namespace, "uid": obj.uid}
        body = {"apiVersion": GROUP_VERSION, "kind": KIND, "metadata": metadata, "status": wanted}
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        try:
            await self.cluster.request(
                "PATCH", obj.status_path, query=query, body=body, content_type=APPLY_PATCH
            )
            await self._write_events(obj, wanted)
        except ApiError as error:
            # Gone, or made again under its name: the watch says which.
            if error.status not in (404, 409):
                log.warning("%s/%s: status or events not written: %s", obj.namespace, obj.name, error)
        except ClusterUnreachable as error:
            log.warning("%s/%s: status or events not written: %s", obj.namespace, obj.name, error)
        return known.write_at

    async def _write_events(self, obj: RolloutObject, wanted: Mapping[str, JSON]) -> None:
        """Write what is new in a status as events; they are for people, so a failure changes nothing."""
        metadata = {"name": obj.name, "namespace": obj.namespace, "uid": obj.uid}
        subject = {"apiVersion": GROUP_VERSION, "kind": KIND, **metadata}
        at = self.state.now()
        for each in transitions(obj.status, wanted):
            key = f"{each.reason}/{each.message}"
            event = ObjectEvent(key, each.reason, each.message, at, is_warning=each.is_warning)
            await write_event(self.cluster, subject, event)

    async def _status(self, known: _Known) -> dict[str, JSON]:
        state, now = self.state, format_rfc3339(self.state.now())
        if not known.rollout:
            return status_of(known.obj, None, (), known.refusal, now)
        try:
            resolved = await resolve_rollout(state, known.rollout)
        except NotFound:
            text = f"{known.rollout} was deleted; make another object to submit the plan again"
            refusal = Refusal("Deleted", text, known.rollout)
            return status_of(known.obj, None, (), refusal, now)
        covered = await coverage_of(state, self._kept, resolved.index, resolved.rollout)
        rollout = serializers.rollout(state, self._kept, resolved, covered)
        unresolved = resolved.index.unresolved_failures(resolved.rollout.id)[:MAX_ITEMS]
        return status_of(
            known.obj, rollout, [node_serializers.failure(each) for each in unresolved], None, now
        )


def _read_within(tree: Path, path: str) -> bytes:
    """Return a file of a tree; a link must not lead out of it."""
    file = (tree / path).resolve()
    if not file.is_relative_to(tree.resolve()):
        raise SourceFailed(f"{path}: outside of the tree; give a path in it")
    try:
        with file.open("rb") as opened:
            # One byte more than the limit, so that the reader reports the excess.
            return opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise SourceFailed(f"{path}: {error.strerror or error}; give a file of the tree") from error
