"""Runs that are changes of one object of a management cluster: applied once, then followed.

The object carries the run and its token, so that another machine and a late daemon find who applied it.
Cancelling ends only the following; nothing is deleted.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from machines.model.rollout import FailureCode
from rolloutd.adapters.ansible.stale_processes import run_name
from rolloutd.adapters.clusters.factory import management_clusters
from rolloutd.adapters.clusters.inventory import MANAGEMENT_KEY, NAME_KEY, NAMESPACE_KEY
from rolloutd.adapters.clusters.object_store import (
    LIMIT,
    PIN,
    TOKEN,
    FieldConflict,
    ObjectMissing,
    ObjectRef,
    ObjectStore,
    TokenIsOlder,
    applied_fields,
    applied_state,
    changed_fields,
    managers_of,
    read_limit,
    run_of,
)
from rolloutd.adapters.clusters.run_records import RunRecord, artifacts_in, records_in
from rolloutd.adapters.kubernetes.api_errors import ApiError, ClusterUnreachable, malformed_answers
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.concurrency import threads
from rolloutd.errors import AdapterFailed, NotFound, RunnerUnavailable
from rolloutd.ports import (
    CLUSTER_ID,
    Artifact,
    Failed,
    Host,
    Ok,
    RunEvent,
    RunnerContext,
    RunnerStatus,
    RunRequest,
    RunState,
    Unknown,
)

POLL_S = 2.0
"""Longest pause between two looks at a run: its limits pass without an event of the watch."""

UNLIMITED = 1000
"""Runs at once: pools and limits of the plan say how many there are."""

MAX_RECREATIONS = 3
"""How often one run makes an object again that a person deleted."""

FAILING_FOR_S = 120.0
"""How long a failure is shown before it counts, unless the plan says it: controllers try again."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What an object says of a run: a result, or what the run does and how far it is.

    `is_failing`: it is a failure once it has lasted, because the controller tries again.
    """

    text: str
    percent: float = 0.0
    result: Ok | Failed | Unknown | None = None
    is_failing: bool = False


class NotPossible(Exception):
    """The change cannot be made, and nothing was applied; its text says why and what to do."""


class ObjectRunner(ABC):
    """ports.Runner and ports.RecordsPrevious of a kind of change; its records are on this machine."""

    kind: str

    settles_s = 0.0
    """How long an object must show that a run is done, where it may show the state before for a moment."""

    def __init__(self, context: RunnerContext) -> None:
        self._context = context
        self._clusters = management_clusters(context)
        self._directory: Path = context.settings.state_dir / "runners" / self.kind
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Of runs that are not over; there may be tens of thousands of others, which stay in their files.
        self._records: dict[str, RunRecord] = {}
        self._active: set[str] = set()
        self._locks: dict[str, asyncio.Lock] = {}
        # By the cluster itself: targets of two lists, and a management cluster, may share a name.
        self._stores: dict[Cluster, ObjectStore] = {}
        self.status = RunnerStatus(UNLIMITED)
        self.artifacts = self
        self.place = self.kind
        context.shared[f"changes {self.kind}"] = self

    # -- what a kind of change is

    @abstractmethod
    def object_of(self, target: Mapping[str, Any], params: Mapping[str, Any]) -> ObjectRef:
        """Return the object that the change of a target is of."""

    @abstractmethod
    def pin_of(self, request: RunRequest) -> str:
        """Return the revision or version that the run is to bring the object to."""

    @property
    @abstractmethod
    def lists(self) -> Sequence[ObjectRef]:
        """The kinds of objects that runs may be of, without a namespace and a name."""

    @abstractmethod
    def spec_of(self, record: RunRecord) -> Mapping[str, Any]:
        """Return the fields that the run applies, and owns from then on; raises NotPossible."""

    @abstractmethod
    async def prepare(self, store: ObjectStore, record: RunRecord) -> str:
        """Do what comes before the apply, and return what it waits for; raises NotPossible."""

    @abstractmethod
    def may_create(self, params: Mapping[str, Any]) -> bool:
        """Return whether the run creates the object if it is not there."""

    @abstractmethod
    def waits_before_apply(self, obj: Mapping[str, Any]) -> str:
        """Return why the object must not be changed now; empty if it may."""

    def kubeconfig_of(self, record: RunRecord, current: Mapping[str, Any]) -> str:
        """Return the Secret by which the change reaches its target, empty for that of Cluster API."""
        return ""

    def annotations_of(self, record: RunRecord, current: Mapping[str, Any] | None) -> Mapping[str, str]:
        """Return further annotations of the object, by what it is before the run."""
        return {}

    @abstractmethod
    def judge(self, record: RunRecord, obj: Mapping[str, Any]) -> Judgement:
        """Return what the object says of the run; the fields that it applied are as it wrote them."""

    @abstractmethod
    async def previous_of(self, store: ObjectStore, obj: Mapping[str, Any]) -> str:
        """Return the state of the object as JSON, without secrets."""

    # -- ports.Runner

    async def check_available(self) -> None:
        return  # a management cluster that does not answer stops its own targets only

    async def find_part_problems(self) -> Mapping[str, str]:
        return await self._clusters.find_silent()

    async def read_previous(self, request: RunRequest) -> str:
        with self._unavailable(request.host.connection):
            store = self._store(request.host.connection)
            obj = await store.get(self.object_of(request.host.connection, request.params))
            return "{}" if obj is None else await self.previous_of(store, obj)

    async def start(self, request: RunRequest) -> str:
        record = self._record(request.run_id)
        async with self._lock(request.run_id):
            if record.result is None:
                with self._unavailable(request.host.connection):
                    # Before the claim: a system that does not answer must not have a run that never began.
                    if not record.exists:
                        self._require_pinned(request.host)
                        await self._store(request.host.connection).cluster.get("/version")
                    self._create(record, request)
                    await self._advance(record)
        self._count(request.run_id, record)
        return request.run_id

    async def get_state(self, handle: str) -> RunState:
        record = self._record(handle)
        async with self._lock(handle):
            if not record.exists:
                await self._adopt(handle, record)
            with self._unavailable(record.content["target"]):
                if record.result is None:
                    await self._advance(record)
        self._count(handle, record)
        return record.state()

    async def wait_for_change(self, handle: str) -> RunState:
        record = self._record(handle)
        before = len(record.content.get("events") or ())
        while True:
            state = await self.get_state(handle)
            if state.result is not None or len(record.content.get("events") or ()) != before:
                return state
            ref = self._object(record)
            await self._store(record.content["target"]).wait_for_change(ref, POLL_S)

    async def read_events(self, handle: str, offset: int = 0) -> AsyncIterator[RunEvent]:
        record = self._record(handle)
        if not record.exists:
            raise NotFound(f"there is no run {handle} of the kind {self.kind}")
        for event in record.events(offset):
            yield event

    async def cancel(self, handle: str) -> None:
        record = self._record(handle)
        async with self._lock(handle):
            if not record.exists:
                raise NotFound(f"there is no run {handle} of the kind {self.kind}")
            what = "what it applied stays" if record.applied else "it is not known to have applied anything"
            text = f"the change of {self._object(record)} was cancelled; {what}"
            record.store_result(Failed(text, code=FailureCode.INTERFERENCE), self._context.clock.now())
        self._count(handle, record)

    async def discard(self, handle: str) -> None:
        self._record(handle).path.unlink(missing_ok=True)
        self._forget(handle)

    async def clean_up_stale_runs(
        self, host: Host, *, timeout_s: float, fencing_token: str = ""
    ) -> Ok | Failed | Unknown:
        """End the following of the target's runs: an object has nothing of a run that could still act."""
        for found in await threads.RUNS.run(records_in, self._directory):
            if found.content.get("node") == host.name and found.result is None:
                run, text = found.content["run"], f"its result was not known when {host.name} was cleaned up"
                record = self._record(run)
                record.store_result(Unknown(text), self._context.clock.now())
                self._count(run, record)
        return Ok("a change leaves nothing that acts by itself")

    # -- ports.ArtifactStore

    async def list_artifacts(self) -> Sequence[Artifact]:
        return await threads.RUNS.run(artifacts_in, self._directory)

    async def remove(self, name: str, *, unmodified_since: float) -> bool:
        record = self._record(name)
        if record.exists and record.artifact().modified_at > unmodified_since:
            return False
        await self.discard(name)
        return True

    async def close(self) -> None:
        for store in self._stores.values():
            await store.close()

    # -- one run

    async def _advance(self, record: RunRecord) -> None:
        """Do what a run can do now, and record it; its limits count from its own start."""
        now = self._context.clock.now()
        store, ref = self._store(record.content["target"]), self._object(record)
        try:
            if record.applied is None:
                judgement = await self._apply(store, ref, record)
            else:
                judgement = await self._look(store, ref, record)
        except TokenIsOlder as error:
            judgement = _failed(f"a later run has the object: {error}", FailureCode.INTERFERENCE)
        except (NotPossible, FieldConflict, ObjectMissing) as error:
            judgement = _failed(str(error), record.failure_code)
        except ApiError as error:
            # A right that is lost while a run is followed says nothing of the run.
            if error.is_retryable or (record.applied and error.status == 403):
                raise
            judgement = _failed(f"{ref}: {error}", record.failure_code)
        judgement = self._settled(record, judgement, now)
        result = judgement.result or self._limit_of(record, judgement, now)
        if result is None:
            record.note(judgement.text, judgement.percent, now)
        else:
            record.store_result(result, now)

    def _settled(self, record: RunRecord, judgement: Judgement, now: float) -> Judgement:
        """Return the judgement; until it has lasted, a run that is done is one that continues."""
        if not self.settles_s:
            return judgement
        since = record.note_since("done_since", now, holds=isinstance(judgement.result, Ok))
        if since is None or now - since >= self.settles_s:
            return judgement
        return Judgement(f"{judgement.text}; it must last for {self.settles_s:g} s", 95.0)

    def _limit_of(self, record: RunRecord, judgement: Judgement, now: float) -> Failed | None:
        """Return the failure of a run that is past a limit: its own, or that of a failure that lasts."""
        since = record.note_since("failing_since", now, holds=judgement.is_failing)
        failing_for_s = float(record.content["params"].get("failing_for", FAILING_FOR_S))
        if since is not None and now - since >= failing_for_s:
            return Failed(judgement.text)
        limit_s = float(record.content["timeout_s"])
        if now - float(record.content["began_at"]) >= limit_s:
            code = FailureCode.FAILED if record.applied else FailureCode.NEVER_STARTED
            return Failed(f"time limit {limit_s:g} s: {judgement.text}", code=code)
        return None

    async def _apply(self, store: ObjectStore, ref: ObjectRef, record: RunRecord) -> Judgement:
        current = await store.get(ref)
        # Written before, if a kill or a lost answer came between the write and its record: nothing is waited
        # for any more, and a failure would count as one before the change.
        is_written = current is not None and run_of(current) == record.content["run"]
        waits = "" if is_written else await self._waits_before_apply(store, ref, record, current)
        if waits:
            return Judgement(waits, 5.0)
        await self._write(store, ref, record)
        return Judgement(f"{ref}: applied", 30.0)

    async def _waits_before_apply(
        self, store: ObjectStore, ref: ObjectRef, record: RunRecord, current: Mapping[str, Any] | None
    ) -> str:
        waits = await self.prepare(store, record)
        if not waits and current is not None:
            waits = _removal(ref, current) or self.waits_before_apply(current)
        return waits or await self._check_identity(record, {} if current is None else current)

    async def _check_identity(self, record: RunRecord, current: Mapping[str, Any]) -> str:
        """Return why the target cannot be asked who it is; raises NotPossible if it is another cluster."""
        target = record.content["target"]
        identities = self._clusters.identities.get(str(target.get(MANAGEMENT_KEY)))
        if identities is None:
            return ""
        name, pinned = f"{target[NAMESPACE_KEY]}/{target[NAME_KEY]}", target.get(CLUSTER_ID, "a pinned one")
        try:
            reached = await identities.read(name, self.kubeconfig_of(record, current))
        except (ApiError, ClusterUnreachable) as error:
            # Also of a Secret that is missing: its controller may be writing it.
            return f"cluster {name}: its kubeconfig cannot be checked: {error}"
        if reached == pinned:
            return ""
        text = f"cluster {name}: its kubeconfig reaches {reached}, not {pinned}"
        raise NotPossible(f"{text}; correct the Secret, or accept it with rolloutctl inventory pin")

    def _require_pinned(self, host: Host) -> None:
        """Raise RunnerUnavailable for a target that has nothing yet with which its kubeconfig is compared."""
        management = str(host.connection.get(MANAGEMENT_KEY))
        if management in self._clusters.identities and not host.connection.get(CLUSTER_ID):
            text = f"{host.name}: its kubeconfig has not reached it yet; its first identity is waited for"
            raise RunnerUnavailable(text, part=host.name)

    async def _write(self, store: ObjectStore, ref: ObjectRef, record: RunRecord) -> None:
        content, spec = record.content, self.spec_of(record)
        may_create = self.may_create(content["params"])
        obj = await store.write(
            ref,
            spec,
            run=content["run"],
            token=content["token"],
            pin=content["pin"],
            may_create=may_create,
            annotate=lambda current: {
                LIMIT: f"{content['began_at']} {content['timeout_s']}",
                **self.annotations_of(record, current),
            },
        )
        record.write(applied=applied_state(obj, spec))

    async def _look(self, store: ObjectStore, ref: ObjectRef, record: RunRecord) -> Judgement:
        applied = record.applied
        assert applied is not None
        obj, run = await store.watched(ref), record.content["run"]
        is_ours = obj is not None and run_of(obj) == run
        if obj is None or not is_ours or int(obj["metadata"]["generation"]) < int(applied["generation"]):
            # The watch may be behind our own write, and a person may have deleted the object since.  A write
            # that changes no field leaves the generation as it was.
            obj = await store.get(ref)
        if obj is None:
            return await self._make_again(store, ref, record)
        if waits := _removal(ref, obj):
            return Judgement(waits, 30.0)
        if (other := run_of(obj)) != run:
            by = f"run {other}" if other else "another client, which created it again"
            return _failed(f"{ref} was taken over by {by}", FailureCode.INTERFERENCE)
        changed = changed_fields(obj, applied["spec"])
        if changed:
            by = ", ".join(managers_of(obj, changed)) or "another client"
            text = f"{ref}: {by} changed {', '.join(changed[:5])} after this run; let one writer own it"
            return _failed(text, FailureCode.INTERFERENCE)
        return self.judge(record, obj)

    async def _make_again(self, store: ObjectStore, ref: ObjectRef, record: RunRecord) -> Judgement:
        """Create an object again that was deleted during the run, with the recorded fields."""
        made = int(record.content.get("recreations") or 0)
        if not self.may_create(record.content["params"]) or made >= MAX_RECREATIONS:
            return _failed(f"{ref} was deleted during the run", FailureCode.INTERFERENCE)
        if waits := await self._check_identity(record, {}):
            return Judgement(waits, 30.0)
        record.write(recreations=made + 1)
        await self._write(store, ref, record)
        return Judgement(f"{ref}: it was deleted, and is made again", 30.0)

    async def _adopt(self, handle: str, record: RunRecord) -> None:
        """Begin the record of a run that another machine began, by the object that carries it."""
        silent: RunnerUnavailable | None = None
        for name, cluster in self._clusters.clusters().items():
            store = self._store_in(cluster)
            namespace = self._clusters.namespace_of(name)
            lists = [replace(each, namespace=namespace) for each in self.lists]
            try:
                with self._unavailable({MANAGEMENT_KEY: name, NAME_KEY: cluster.name}):
                    found = await store.find_run(lists, handle)
            except RunnerUnavailable as error:
                silent = error  # another one may have the run
                continue
            if found is None:
                continue
            ref, obj = found
            notes = obj["metadata"]["annotations"]
            began_at, timeout_s = read_limit(notes.get(LIMIT, ""), self._context.clock.now())
            record.write(
                run=handle,
                node="",
                rollout="",
                timeout_s=timeout_s,
                began_at=began_at,
                token=notes.get(TOKEN, ""),
                pin=notes.get(PIN, ""),
                ref=asdict(ref),
                target={"cluster_management": name},
                params={},
                events=[],
                result=None,
                applied=applied_state(obj, applied_fields(obj)),
            )
            return
        raise silent or NotFound(f"there is no run {handle} of the kind {self.kind}")

    def _create(self, record: RunRecord, request: RunRequest) -> None:
        try:
            ref = self.object_of(request.host.connection, request.params)
        except NotPossible as error:
            raise AdapterFailed(str(error)) from error
        now, pin = self._context.clock.now(), self.pin_of(request)
        record.create(request, now, ref=asdict(ref), pin=pin)

    # -- helpers

    def _store(self, target: Mapping[str, Any]) -> ObjectStore:
        cluster = self._clusters.management_of(Host("", connection=target))
        if cluster is None:
            name = target.get("cluster_management")
            raise AdapterFailed(f"the settings no longer name the management cluster {name}")
        return self._store_in(cluster)

    def _store_in(self, cluster: Cluster) -> ObjectStore:
        return self._stores.setdefault(cluster, ObjectStore(cluster))

    @contextmanager
    def _unavailable(self, target: Mapping[str, Any]) -> Iterator[None]:
        """Turn a target's server that does not answer, or not as it must, into RunnerUnavailable."""
        try:
            with malformed_answers():
                yield
        except ClusterUnreachable as error:
            raise RunnerUnavailable(str(error), part=self._clusters.part_of(target)) from error
        except ApiError as error:
            if error.is_retryable or error.status == 403:
                text = f"cluster {target.get(MANAGEMENT_KEY)}: {error}"
                raise RunnerUnavailable(text, part=self._clusters.part_of(target)) from error
            raise AdapterFailed(str(error)) from error

    def _object(self, record: RunRecord) -> ObjectRef:
        return ObjectRef(**record.content["ref"])

    def _record(self, run_id: str) -> RunRecord:
        name = run_name(run_id)
        record = self._records.get(name) or RunRecord(self._directory / f"{name}.json")
        if record.result is None:
            self._records[name] = record
        return record

    def _lock(self, run_id: str) -> asyncio.Lock:
        return self._locks.setdefault(run_name(run_id), asyncio.Lock())

    def _count(self, run_id: str, record: RunRecord) -> None:
        """Count a run as active, or forget one that is over."""
        if record.result is None:
            self._active.add(run_name(run_id))
        else:
            self._forget(run_id)
        self.status.active = len(self._active)

    def _forget(self, run_id: str) -> None:
        name = run_name(run_id)
        self._active.discard(name)
        self._records.pop(name, None)
        self._locks.pop(name, None)


def _failed(text: str, code: FailureCode) -> Judgement:
    return Judgement(text, result=Failed(text, code=code))


def _removal(ref: ObjectRef, obj: Mapping[str, Any]) -> str:
    return f"{ref} is being deleted" if obj["metadata"].get("deletionTimestamp") else ""
