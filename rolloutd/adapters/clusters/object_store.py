"""Objects of a management cluster, read by one watch for all runs, and written without force.

A write names the run and its fencing token in annotations of the same patch, and the version that was read:
an object that carries a newer token is not written.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rolloutd.adapters.ansible.fence import CLOCK_SLACK_S
from rolloutd.adapters.kubernetes.answer_slices import Convert
from rolloutd.adapters.kubernetes.api_errors import ApiError
from rolloutd.adapters.kubernetes.cluster import DEFAULT_DOMAIN, FIELD_MANAGER, Cluster, api_path
from rolloutd.adapters.kubernetes.list_watch import WatchHandler, run_list_watch
from rolloutd.ports import JSON

RUN: Final = f"{DEFAULT_DOMAIN}/run"
TOKEN: Final = f"{DEFAULT_DOMAIN}/token"
PIN: Final = f"{DEFAULT_DOMAIN}/pin"
"""Annotation with the revision or version that the run applied."""

LIMIT: Final = f"{DEFAULT_DOMAIN}/limit"
"""Annotation with when the run began and its time limit, `EPOCH_SECONDS SECONDS`."""

APPLY_PATCH: Final = "application/apply-patch+yaml"
JSON_PATCH: Final = "application/json-patch+json"

MAX_APPLIES = 5
"""Tries of one write: each fails only if another client wrote between our read and our write."""

IDLE_S = 60.0
"""How long a watch stays open without a run that is followed."""

ADOPTED_LIMIT_S = 1800.0
"""Time limit of a run that another machine began, if another writer has spoilt the object's note of it."""

Annotate = Callable[[Mapping[str, JSON] | None], Mapping[str, str]]
"""Returns further annotations of a write, by the object that it replaces."""


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """An object by its kind and name; `group` has the version, as in `apps/v1`."""

    group: str
    kind: str
    resource: str
    namespace: str
    name: str

    @property
    def path(self) -> str:
        return api_path(self.resource, self.name, namespace=self.namespace, group=self.group)

    @property
    def list_path(self) -> str:
        return api_path(self.resource, namespace=self.namespace, group=self.group)

    def body(self, spec: Mapping[str, JSON], annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": self.name, "namespace": self.namespace}
        if annotations:
            metadata["annotations"] = dict(annotations)
        return {"apiVersion": self.group, "kind": self.kind, "metadata": metadata, "spec": spec}

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


class TokenIsOlder(Exception):
    """The object carries the token of a later run."""


class FieldConflict(Exception):
    """Another writer owns a field with another value; its text names both."""


class ObjectMissing(Exception):
    """The object is not there, and the change does not create it."""


def refuses(seen: str, token: str) -> bool:
    """Return whether an object with one fencing token refuses a run with another, as a node's fence does.

    Numbers of two databases are not comparable: such a run is refused if it began long before.
    """
    (order, owner, began_at), (new_order, new_owner, new_began_at) = _parts(seen), _parts(token)
    if owner and new_owner and owner != new_owner:
        return began_at > new_began_at + CLOCK_SLACK_S
    return order >= new_order


def _parts(token: str) -> tuple[tuple[int, int], str, int]:
    """Return the numbers of a token, `epoch.number OWNER SECOND`, its owner and its second."""
    number, owner, began_at = (*token.split(), "", "", "")[:3]
    epoch, _, last = number.partition(".")
    order = (int(epoch), int(last)) if epoch.isdecimal() and last.isdecimal() else (0, 0)
    return order, owner, int(began_at) if began_at.isdecimal() else 0


def read_limit(note: str, now: float) -> tuple[float, float]:
    """Return when a run of another machine began, and its time limit (epoch seconds, seconds)."""
    began_at, _, timeout_s = note.partition(" ")
    try:
        found = float(began_at), float(timeout_s)
    except ValueError:
        return now, ADOPTED_LIMIT_S
    return found if all(map(math.isfinite, found)) else (now, ADOPTED_LIMIT_S)


def run_of(obj: Mapping[str, JSON]) -> str | None:
    """Return the run that wrote an object last, None for an object that no run wrote."""
    return (obj["metadata"].get("annotations") or {}).get(RUN)


class ObjectStore:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._watches: dict[str, _Watch] = {}

    async def get(self, ref: ObjectRef) -> Mapping[str, JSON] | None:
        """Return an object as it is now, None without one."""
        try:
            return dict(await self.cluster.get(ref.path))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def watched(self, ref: ObjectRef) -> Mapping[str, JSON] | None:
        """Return an object by the watch of its kind, None without one; the first call opens the watch."""
        watch = self._watch(ref)
        await watch.wait_until_synced()
        return watch.objects.get(ref.name)

    async def wait_for_change(self, ref: ObjectRef, timeout_s: float) -> None:
        """Return when an object of the kind has changed, or the watch has failed, or after the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._watch(ref).wait_for(ref.name)

    async def write(
        self,
        ref: ObjectRef,
        spec: Mapping[str, JSON],
        *,
        run: str,
        token: str,
        pin: str,
        may_create: bool,
        annotate: Annotate = lambda _: {},
    ) -> Mapping[str, JSON]:
        """Apply the fields for a run and return the object; a run that was applied is not applied again.

        Raises TokenIsOlder, FieldConflict and ObjectMissing.
        """
        for _ in range(MAX_APPLIES):
            current = await self.get(ref)
            if current is not None:
                notes = current["metadata"].get("annotations") or {}
                if notes.get(RUN) == run:
                    return current
                if token and TOKEN in notes and refuses(notes[TOKEN], token):
                    raise TokenIsOlder(f"{ref} carries {notes[TOKEN]!r} of run {notes.get(RUN)}")
            elif not may_create:
                raise ObjectMissing(f"{ref} does not exist; create it, or let the plan create it")
            annotations = {RUN: run, PIN: pin, **({TOKEN: token} if token else {}), **annotate(current)}
            body = ref.body(spec, annotations)
            try:
                if current is None:
                    return dict(await self.cluster.post(ref.list_path, body))
                current = await self._own(ref, current)
                body["metadata"]["resourceVersion"] = current["metadata"]["resourceVersion"]
                return await self.apply(ref, body)
            except ApiError as error:
                if error.status != 409:
                    raise
                if "FieldManagerConflict" in error.causes:
                    raise FieldConflict(f"{ref}: {error.message}") from error
        raise ApiError(409, "Conflict", f"{ref} is written by others all the time")

    async def find_run(
        self, lists: Sequence[ObjectRef], run: str
    ) -> tuple[ObjectRef, Mapping[str, JSON]] | None:
        """Return the object of these lists that carries a run, None without one."""
        for ref in lists:
            for obj in await self.list(ref, without_inventory):
                if run_of(obj) == run:
                    meta = obj["metadata"]
                    return replace(ref, namespace=meta["namespace"], name=meta["name"]), obj
        return None

    async def list(self, ref: ObjectRef, convert: Convert) -> Sequence[Any]:
        """Return the objects of a kind, each converted; none where its controller is not installed."""
        try:
            return (await self.cluster.list(ref.list_path, convert=convert)).items
        except ApiError as error:
            if error.status == 404:
                return ()
            raise

    async def apply(self, ref: ObjectRef, body: Mapping[str, JSON]) -> Mapping[str, JSON]:
        """Apply server-side without force."""
        answer = await self.cluster.request(
            "PATCH", ref.path, query={"fieldManager": FIELD_MANAGER}, body=body, content_type=APPLY_PATCH
        )
        return dict(answer)

    async def delete(self, ref: ObjectRef, found: Mapping[str, JSON]) -> None:
        """Delete an object that is as it was found; raises ApiError (409) if it has changed."""
        meta = found["metadata"]
        preconditions = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
        await self.cluster.request("DELETE", ref.path, body={"preconditions": preconditions})

    async def _own(self, ref: ObjectRef, current: Mapping[str, JSON]) -> Mapping[str, JSON]:
        """Make the fields of our creation those of our applies, as kubectl does when it migrates.

        A server-side apply cannot refuse to create over an object, so objects are created by a plain request.
        """
        managed = current["metadata"].get("managedFields") or []
        ours = [each for each in managed if _is_creation(each)]
        if not ours:
            return current
        changed = [{**each, "operation": "Apply"} if _is_creation(each) else each for each in managed]
        version = current["metadata"]["resourceVersion"]
        patch = [
            {"op": "replace", "path": "/metadata/resourceVersion", "value": version},
            {"op": "replace", "path": "/metadata/managedFields", "value": changed},
        ]
        return dict(
            await self.cluster.request(
                "PATCH", ref.path, query={"fieldManager": FIELD_MANAGER}, body=patch, content_type=JSON_PATCH
            )
        )

    async def close(self) -> None:
        for watch in self._watches.values():
            await watch.close()

    def _watch(self, ref: ObjectRef) -> _Watch:
        if ref.list_path not in self._watches:
            self._watches[ref.list_path] = _Watch(self.cluster, ref.list_path)
        return self._watches[ref.list_path]


class _Watch(WatchHandler):
    """The objects of one list while runs are followed."""

    def __init__(self, cluster: Cluster, path: str) -> None:
        self._cluster, self._path = cluster, path
        self.objects: dict[str, Mapping[str, JSON]] = {}
        self._problem: str | None = None
        self._is_synced = asyncio.Event()
        self._changed: dict[str, asyncio.Event] = {}
        self._task: asyncio.Task[None] | None = None
        self._used_at = 0.0

    async def wait_until_synced(self) -> None:
        """Open the watch if it is not open; raises ApiError while the server refuses or does not answer."""
        self._used_at = asyncio.get_running_loop().time()
        if self._task is None or self._task.done():
            self._is_synced.clear()
            self._task = asyncio.create_task(self._run(), name=f"watch {self._path}")
        await self._is_synced.wait()
        if self._problem is not None:
            raise ApiError(503, "ServiceUnavailable", self._problem)

    async def wait_for(self, name: str) -> None:
        event = self._changed.setdefault(name, asyncio.Event())
        await event.wait()

    async def _run(self) -> None:
        watching = asyncio.create_task(run_list_watch(self._cluster, self._path, {}, self))
        try:
            while asyncio.get_running_loop().time() - self._used_at < IDLE_S:
                await asyncio.wait((watching,), timeout=IDLE_S)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self.objects.clear()
            self._changed.clear()

    def parse(self, obj: Mapping[str, JSON]) -> Mapping[str, JSON]:
        return without_inventory(obj)

    def on_list(self, objects: Sequence[Any]) -> None:
        self.objects = {each["metadata"]["name"]: each for each in objects}
        self._announce(None)

    def on_event(self, kind: str, obj: Mapping[str, JSON]) -> None:
        name = obj["metadata"]["name"]
        if kind == "DELETED":
            self.objects.pop(name, None)
        else:
            self.objects[name] = without_inventory(obj)
        self._wake(name)

    def on_connected(self) -> None:
        if self._problem is not None:
            self._announce(None)

    def on_disconnected(self, reason: str) -> None:
        self._announce(reason)

    def _announce(self, problem: str | None) -> None:
        self._problem = problem
        self._is_synced.set()
        for name in list(self._changed):
            self._wake(name)

    def _wake(self, name: str) -> None:
        if (event := self._changed.pop(name, None)) is not None:
            event.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def without_inventory(obj: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return an object without the list of what it applied, which may be hundreds of KiB."""
    status = {key: value for key, value in (obj.get("status") or {}).items() if key != "inventory"}
    return {**obj, "status": status}


def changed_fields(obj: Mapping[str, JSON], applied: Mapping[str, JSON]) -> list[str]:
    """Return the fields of the spec that are not as they were applied, as paths."""
    return [".".join(path) for path in _different(obj.get("spec") or {}, applied, ("spec",))]


def applied_fields(obj: Mapping[str, JSON]) -> dict[str, Any]:
    """Return the fields of the spec that our applies own, with their present values."""
    for entry in obj["metadata"].get("managedFields") or ():
        if entry.get("manager") == FIELD_MANAGER and not entry.get("subresource"):
            return _owned(obj.get("spec") or {}, (entry.get("fieldsV1") or {}).get("f:spec") or {})
    return {}


def applied_state(obj: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record keeps of an object that was written."""
    meta = obj["metadata"]
    return {"uid": meta["uid"], "generation": meta["generation"], "spec": spec}


def _owned(value: JSON, fields: Mapping[str, JSON]) -> dict[str, Any]:
    below = {name[2:]: each for name, each in fields.items() if name.startswith("f:")}
    return {
        name: _owned(value[name], each) if each and isinstance(value[name], Mapping) else value[name]
        for name, each in below.items()
        if name in value
    }


def managers_of(obj: Mapping[str, JSON], fields: Sequence[str]) -> list[str]:
    """Return who owns one of these fields besides us."""
    owners = {
        each["manager"]
        for each in obj["metadata"].get("managedFields") or ()
        if each.get("manager") != FIELD_MANAGER
        and any(_owns(each.get("fieldsV1"), field) for field in fields)
    }
    return sorted(owners - {FIELD_MANAGER})


def _different(value: JSON, applied: JSON, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    if isinstance(applied, Mapping):
        below = value if isinstance(value, Mapping) else {}
        return [
            each for key, item in applied.items() for each in _different(below.get(key), item, (*path, key))
        ]
    if isinstance(applied, list) and isinstance(value, list) and len(value) == len(applied):
        # The server fills default values into the items of a list too.
        pairs = zip(value, applied, strict=True)
        return [path] if any(_different(*each, path) for each in pairs) else []
    return [] if value == applied else [path]


def _owns(fields: JSON, path: str) -> bool:
    for part in path.split("."):
        if not isinstance(fields, Mapping) or f"f:{part}" not in fields:
            return False
        fields = fields[f"f:{part}"]
    return True


def _is_creation(entry: Mapping[str, JSON]) -> bool:
    return (
        entry.get("manager") == FIELD_MANAGER
        and entry.get("operation") == "Update"
        and not entry.get("subresource")
    )
