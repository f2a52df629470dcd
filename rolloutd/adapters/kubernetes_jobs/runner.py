"""Runner of Kubernetes Jobs.

A run is a Job whose name follows from the run's id, so its creation is the claim.  The result counts only
from the pod's own termination message, with the run's id and the pod's uid; every other end is unknown.  A
directory here keeps the run's events and its result, for when the pod is gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from machines.model.rollout import FailureCode
from rolloutd import ports
from rolloutd.adapters.ansible.progress import to_run_event
from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.adapters.ansible.stale_processes import run_name
from rolloutd.adapters.kubernetes.api_errors import ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.permissions import find_missing_permissions
from rolloutd.adapters.kubernetes_jobs import job as objects
from rolloutd.adapters.kubernetes_jobs import pod_state
from rolloutd.adapters.kubernetes_jobs.records import RunRecord, describe, numbered, records_in
from rolloutd.adapters.kubernetes_jobs.report import MAX_LOG_BYTES
from rolloutd.adapters.kubernetes_jobs.tree_server import TreeServer
from rolloutd.concurrency import threads
from rolloutd.errors import AdapterFailed, NotFound, RunnerUnavailable

POLL_S = 1.0
"""Interval of asking for the pods of many runs, by one request, and for the log of an active run."""

MIN_POLL_S = 0.1
"""Interval of asking for the pods of a few runs: a short run is over soon."""

POLL_PER_POD_S = 0.01
"""Time between two requests for each pod that they return: they cost a few per cent of a core at most."""

GONE_TIMEOUT_S = 150.0
"""Limit of waiting for a deleted Job and its pod: the pod's grace period, and a margin."""

CLEAN_TIMEOUT_S = 10.0
"""Limit of ending what a cancelled run left on the node: its pod has tried it before."""

END_MARGIN_S = 300.0
"""Time after its limits in which a run has ended; a pod on a lost cluster node stays `Running` for ever."""

MAX_SECRET_BYTES = 1024 * 1024
"""The API server's limit of the data of a Secret."""

LOG_OVERLAP_S = 10.0
"""Seconds of a log that are read again: the API counts whole seconds, by the clock of the pod's node."""

UNLIMITED = 1000
"""Runs at once of a runner without `parallel`: the cluster's quota limits them."""


class KubernetesRunner:
    """ports.Runner in one namespace of a cluster; `artifacts` are the records of runs on this machine."""

    def __init__(
        self, context: ports.RunnerContext, cluster: Cluster, trees: TreeServer, stale_runs: ports.StaleRuns
    ) -> None:
        self._context, self._params = context, context.params
        self._cluster, self._trees, self._stale_runs = cluster, trees, stale_runs
        namespace = self._params["namespace"]
        self._jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        self._core = f"/api/v1/namespaces/{namespace}"
        self._budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
        self._owner = hashlib.sha256(stale_runs.marks.encode()).hexdigest()[:32]
        self._directory = context.settings.state_dir / "runners" / context.name
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._records: dict[str, RunRecord] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._log_read_at: dict[str, float] = {}
        self._pods: Mapping[str, Sequence[Mapping[str, Any]]] = {}
        self._pods_at = -math.inf
        self._poll_s = MIN_POLL_S
        self._pods_lock = asyncio.Lock()
        self.status = ports.RunnerStatus(UNLIMITED)
        self.artifacts = self
        self.place = self._find_place(namespace)

    def _find_place(self, namespace: str) -> str:
        """Return the server and the namespace; while the kubeconfig cannot be read, as remembered."""
        remembered = self._directory / "place"
        server = _server_of(self._cluster.kubeconfig, self._cluster.context)
        if server is None:
            return remembered.read_text() if remembered.exists() else str(self._cluster.kubeconfig)
        place = f"{server} {namespace}"
        remembered.write_text(place)
        return place

    # -- ports.Runner

    async def check_available(self) -> None:
        await self._ask("GET", self._jobs, query={"limit": "1"})

    async def start(self, request: ports.RunRequest) -> str:
        record = self._record(request.run_id)
        async with self._lock(request.run_id):
            if record.is_forgotten:
                await self._end_job(request.run_id, record)
                await threads.FILES.run(record.remove)
            if record.result is not None:
                return request.run_id  # it is over, and its Job may be gone
            has_job = await self._get_job(request.run_id) is not None
            # A run that has its Job may be under way on the node: the daemon that began it ended older ones.
            if request.fencing_token and not has_job:
                await self._stale_runs.end_inherited(request.host, request.fencing_token)
            files = await self._files(request)
            size = sum(map(len, files.values()))
            if size > MAX_SECRET_BYTES and not has_job:
                text = f"what the run is given has {size} bytes, and a Secret at most {MAX_SECRET_BYTES}"
                record.create(**describe(request))
                record.store_result(ports.Failed(f"{request.node}: {text}", code=FailureCode.NEVER_STARTED))
                return request.run_id
            job = await self._claim(request, is_known=record.exists)
            record.create(**describe(request))
            record.set_uid(job["metadata"]["uid"])
            if not pod_state.is_finished(job):
                await self._create(f"{self._core}/secrets", objects.build_secret(job, files))
                await self._create(self._budgets, objects.build_budget(job))
        return request.run_id

    async def get_state(self, handle: str) -> ports.RunState:
        record = self._record(handle)
        async with self._lock(handle):
            if record.is_forgotten:
                raise NotFound(f"run {handle} of runner {self._context.name} is older than the database")
            result, waits = record.result, ""
            if result is None:
                result, waits = await self._look(handle, record)
                if result is not None:
                    record.store_result(result)
            return await threads.RUNS.run(record.state, result, waits)

    async def wait_for_change(self, handle: str) -> ports.RunState:
        directory = self._record(handle).directory
        before = directory.events_size()
        while True:
            state = await self.get_state(handle)
            if state.result is not None or directory.events_size() != before:
                return state
            await asyncio.sleep(self._poll_s)

    async def read_events(self, handle: str, offset: int = 0) -> AsyncIterator[ports.RunEvent]:
        record = self._record(handle)
        if not record.exists:
            raise NotFound(f"there is no run {handle} of runner {self._context.name}")
        while lines := await threads.RUNS.run(record.directory.read_events, offset):
            for line in lines:
                yield to_run_event(line)
            offset = lines[-1].offset

    async def cancel(self, handle: str) -> None:
        record = self._record(handle)
        if (await self.get_state(handle)).result is not None:
            return
        node = str(record.metadata.get("node", ""))
        await self._end_job(handle, record)
        async with self._lock(handle):
            text = f"the run of {record.metadata.get('playbook')} on {node} was cancelled"
            record.store_result(ports.Failed(text, code=FailureCode.INTERFERENCE))
        host = ports.Host(node, connection=self._context.inventory().hosts.get(node, {}))
        left = await self._stale_runs.clean_up_stale_runs(host, timeout_s=CLEAN_TIMEOUT_S)
        if not isinstance(left, ports.Ok):
            raise AdapterFailed(left.text)

    async def discard(self, handle: str) -> None:
        record = self._record(handle)
        await self._delete(handle, str(record.metadata.get("uid", "")))
        await threads.FILES.run(record.remove)
        for kept in (self._records, self._locks, self._log_read_at):
            kept.pop(handle, None)

    async def clean_up_stale_runs(
        self, host: ports.Host, *, timeout_s: float, fencing_token: str = ""
    ) -> ports.Ok | ports.Failed | ports.Unknown:
        return await self._stale_runs.clean_up_stale_runs(
            host, timeout_s=timeout_s, fencing_token=fencing_token
        )

    async def find_missing_prerequisites(self) -> Sequence[str]:
        """Return which rights the namespace lacks, or what refuses or changes a Job."""
        rights = objects.required_permissions(self._params["namespace"])
        missing = await find_missing_permissions(self._cluster, permissions=rights)
        if missing:
            return missing
        host = ports.Host("none")
        job = objects.build_job(
            ports.RunRequest("doctor", host, ports.PinnedSource("", ""), "", rollout=""),
            self._owner,
            self._params,
        )
        try:
            answer = await self._ask("POST", self._jobs, query={"dryRun": "All"}, body=job)
        except (ApiError, RunnerUnavailable) as error:
            return [f"namespace {self._params['namespace']} refuses a Job: {error}"]
        changed = objects.difference(answer)
        return [f"the cluster changes {changed} of a Job, so a run could begin twice"] if changed else []

    # -- ports.ArtifactStore

    async def list_artifacts(self) -> Sequence[ports.Artifact]:
        return [each.artifact() for each in await threads.FILES.run(records_in, self._directory)]

    async def remove(self, name: str, *, unmodified_since: float) -> bool:
        record = RunRecord(RunDirectory(self._directory / name))
        if not record.directory.path.is_dir():
            return True
        if record.result is None or record.artifact().modified_at > unmodified_since:
            return False
        await self.discard(str(record.metadata.get("run", name)))
        return True

    # -- starting

    async def _claim(self, request: ports.RunRequest, *, is_known: bool) -> Mapping[str, Any]:
        """Create the Job, or adopt the one that this run has created before; a changed one was none."""
        wanted = objects.build_job(request, self._owner, self._params)
        job: Mapping[str, Any] | None
        try:
            job, is_known = dict(await self._ask("POST", self._jobs, body=wanted)), False
        except ApiError as error:
            if error.status != 409:
                raise RunnerUnavailable(str(error), is_full="quota" in error.message) from error
            job = await self._get_job(request.run_id)
            if job is None or pod_state.run_of(job) != request.run_id:
                name = objects.job_name(request.run_id)
                raise RunnerUnavailable(f"job {name}: it is being removed, or another run has it") from error
        if not is_known and (changed := objects.difference(job)):
            await self._delete(request.run_id, job["metadata"]["uid"])
            raise RunnerUnavailable(f"the cluster changed {changed} of a Job; a run could begin twice")
        return job

    async def _create(self, path: str, body: Mapping[str, Any]) -> None:
        try:
            await self._ask("POST", path, body=body)
        except ApiError as error:
            if error.status != 409:  # an earlier call has made it
                raise RunnerUnavailable(str(error)) from error

    async def _files(self, request: ports.RunRequest) -> Mapping[str, bytes]:
        """Return what the pod is given, secrets among it."""
        settings, snapshot, node = self._context.settings, self._context.inventory(), request.node
        url, digest = await self._trees.publish(self._context.find_tree(request.source))
        variables = dict(snapshot.hosts.get(node, request.host.variables))
        variables.pop(ports.GROUPS, None)
        spec = {
            **describe(request),
            "name": objects.job_name(request.run_id),
            "variables_of_node": variables,
            "groups": {name: [node] for name, nodes in snapshot.groups.items() if node in nodes},
            "fence_dir": settings.ansible.fence_dir,
            "pipelining": settings.ansible.pipelining == "on",
            "user": settings.ssh.user,
            "marks": self._stale_runs.marks,
            "variables": dict(request.variables),
            "fencing_token": request.fencing_token,
            "check_only": request.check_only,
            "tree_url": url,
            "tree_sha256": digest,
        }
        ssh, ca = settings.ssh, self._params["trees"].get("ca")
        given = {"known_hosts": ssh.known_hosts, "key": ssh.key_file, "ca.crt": ca}
        read = {name: await threads.FILES.run(Path(path).read_bytes) for name, path in given.items() if path}
        return {"run.json": json.dumps(spec).encode(), **read}

    # -- following

    async def _look(
        self, handle: str, record: RunRecord
    ) -> tuple[ports.Ok | ports.Failed | ports.Unknown | None, str]:
        """Return a run's result, None while it has none, and why it has not begun."""
        pods = (await self._all_pods()).get(objects.job_name(handle), ())
        if not pods or not record.exists:
            job = await self._get_job(handle)
            if not record.exists and (job is None or "deletionTimestamp" in job["metadata"]):
                raise NotFound(f"there is no run {handle} of runner {self._context.name}")
            if job is None:
                return ports.Unknown("the run's Job is gone, and left no result"), ""
            node = str((job["metadata"].get("annotations") or {}).get(objects.NODE, ""))
            record.create(run=handle, node=node)
            if not pods and not pod_state.is_finished(job):
                if record.metadata.get("begun") or job["spec"].get("suspend"):
                    # A Job that was suspended has lost its pod, and would begin the run again.
                    await self._delete(handle, job["metadata"]["uid"])
                    return ports.Unknown("the run's pod is gone, and left no result"), ""
                return await self._unbegun(handle, record, "its pod is not there yet")
            # A pod may have come since they were listed.
            pods = (await self._all_pods(at_once=True)).get(objects.job_name(handle), ())
            if not pods:
                return ports.Unknown("the run's pod is gone, and left no result"), ""
        for pod in pods:
            is_over = pod_state.result_of(pod, handle) is not None
            if is_over or time.time() - self._log_read_at.get(handle, 0.0) >= POLL_S:
                await self._read_log(handle, record, pod)
        if any(map(pod_state.has_begun, pods)):
            record.note_begun()
        result = pod_state.combine([pod_state.result_of(pod, handle) for pod in pods])
        if result is None and not any(map(pod_state.has_begun, pods)):
            return await self._unbegun(handle, record, pod_state.waiting_reason(pods[0]))
        limit_s = float(record.metadata.get("timeout_s", 0.0)) + objects.START_S + END_MARGIN_S
        if result is None and time.time() > float(record.metadata["began_at"]) + limit_s:
            return ports.Unknown(
                "the run's pod is past all limits and has not ended; its cluster node may be lost"
            ), ""
        return result, ""

    async def _unbegun(
        self, handle: str, record: RunRecord, waits: str
    ) -> tuple[ports.Ok | ports.Failed | ports.Unknown | None, str]:
        """Return that a run waits; one that has waited too long is removed, and never began."""
        if time.time() < float(record.metadata["began_at"]) + objects.START_S:
            return None, waits
        try:
            has_begun = await self._end_job(handle, record)
        except AdapterFailed as error:  # what has not ended may begin
            return ports.Unknown(str(error)), ""
        if has_begun:
            return ports.Unknown(f"the run began while it was removed: {waits}"), ""
        return ports.Failed(f"the run never began: {waits}", code=FailureCode.NEVER_STARTED), ""

    async def _all_pods(self, *, at_once: bool = False) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return the pods of all runs by their Jobs: one request serves all who ask in an interval."""
        async with self._pods_lock:
            now = asyncio.get_running_loop().time()
            if at_once or now - self._pods_at >= self._poll_s:
                query = {"labelSelector": f"{objects.OWNER}={self._owner}"}
                with _unavailable():
                    listed = (await self._cluster.list(f"{self._core}/pods", query)).items
                self._pods, self._pods_at = pod_state.by_job(listed), now
                self._poll_s = min(POLL_S, max(MIN_POLL_S, len(listed) * POLL_PER_POD_S))
                self.status.active = sum(
                    pod["status"].get("phase") in ("Pending", "Running") for pod in listed
                )
        return self._pods

    async def _read_log(self, handle: str, record: RunRecord, pod: Mapping[str, Any]) -> None:
        """Append the new lines of a pod; without them the result is still the pod's message."""
        if not pod_state.has_begun(pod):
            return
        path, now = f"{self._core}/pods/{pod['metadata']['name']}/log", time.time()
        query = {"container": objects.CONTAINER}
        try:
            if (read_at := self._log_read_at.get(handle)) is not None:
                since = {"sinceSeconds": str(int(now - read_at + LOG_OVERLAP_S))}
                lines = await self._read_lines(path, {**query, **since})
                if lines and min(lines) <= record.last_line + 1:
                    query = {}
            if query:  # the first time, and after a gap
                lines = await self._read_lines(path, query)
        except (ApiError, ClusterUnreachable):
            return
        self._log_read_at[handle] = now
        await threads.RUNS.run(record.append, lines)

    async def _read_lines(self, path: str, query: Mapping[str, str]) -> Mapping[int, Mapping[str, Any]]:
        text = await self._cluster.read_text(path, {**query, "limitBytes": str(2 * MAX_LOG_BYTES)})
        return await threads.RUNS.run(numbered, text)

    # -- ending

    async def _end_job(self, handle: str, record: RunRecord) -> bool:
        """Delete a run's Job and wait for the end of its pod; return whether that was seen to have begun."""
        await self._delete(handle, str(record.metadata.get("uid", "")))
        until, has_begun = time.monotonic() + GONE_TIMEOUT_S, False
        while True:
            pods = (await self._all_pods(at_once=True)).get(objects.job_name(handle), ())
            has_begun |= any(map(pod_state.has_begun, pods))
            if not pods and await self._get_job(handle) is None:
                return has_begun
            if time.monotonic() > until:
                raise AdapterFailed(f"the pod of {handle} does not end; its cluster node may be lost")
            await asyncio.sleep(MIN_POLL_S)

    async def _delete(self, handle: str, uid: str) -> None:
        # Foreground, because by default the pods would stay; with the uid, because the name may be another's.
        options = {"propagationPolicy": "Foreground", **({"preconditions": {"uid": uid}} if uid else {})}
        try:
            await self._ask("DELETE", self._job_path(handle), body=options)
        except ApiError as error:
            if error.status not in (404, 409):
                raise AdapterFailed(f"{handle}: its Job cannot be deleted: {error}") from error

    async def _get_job(self, handle: str) -> Mapping[str, Any] | None:
        try:
            return dict(await self._ask("GET", self._job_path(handle)))
        except ApiError as error:
            if error.status == 404:
                return None
            raise RunnerUnavailable(str(error)) from error

    # -- helpers

    def _record(self, run_id: str) -> RunRecord:
        directory = RunDirectory(self._directory / run_name(run_id))
        return self._records.setdefault(run_id, RunRecord(directory))

    def _lock(self, run_id: str) -> asyncio.Lock:
        return self._locks.setdefault(run_id, asyncio.Lock())

    def _job_path(self, run_id: str) -> str:
        return f"{self._jobs}/{objects.job_name(run_id)}"

    async def _ask(self, method: str, path: str, **more: Any) -> Any:
        with _unavailable():
            return await self._cluster.request(method, path, **more)


def make_runner(context: ports.RunnerContext) -> KubernetesRunner:
    params = context.params
    cluster = Cluster(context.name, params["kubeconfig"], params.get("context"))
    trees = TreeServer(params["trees"], context.settings.state_dir / "tree-url.key")
    assert context.stale_runs is not None, "the runner of this machine is made first"
    context.shared[f"runner {context.name}"] = cluster
    context.shared[f"trees {context.name}"] = trees
    return KubernetesRunner(context, cluster, trees, context.stale_runs)


def _server_of(kubeconfig: Path, context: str | None) -> str | None:
    """Return the address of the API server, None for a file that has none."""
    try:
        document = yaml.safe_load(kubeconfig.read_text())
        contexts = {each["name"]: each["context"]["cluster"] for each in document["contexts"]}
        servers = {each["name"]: each["cluster"]["server"] for each in document["clusters"]}
        return str(servers[contexts[context or document["current-context"]]]).rstrip("/")
    except (OSError, UnicodeDecodeError, yaml.YAMLError, LookupError, TypeError, RecursionError):
        return None


@contextmanager
def _unavailable() -> Iterator[None]:
    """Turn a server that does not answer, or cannot now, into RunnerUnavailable."""
    try:
        yield
    except ClusterUnreachable as error:
        raise RunnerUnavailable(str(error)) from error
    except ApiError as error:
        if error.is_retryable or error.status == 403:
            raise RunnerUnavailable(str(error), is_full="quota" in error.message) from error
        raise
