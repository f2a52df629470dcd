"""What clusters do that a runner must bear: second pods, lost logs, refusals, changed Jobs, and secrets."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from machines.model.rollout import FailureCode
from rolloutd.adapters.kubernetes_jobs import job as objects
from rolloutd.adapters.kubernetes_jobs import runner as runner_module
from rolloutd.adapters.kubernetes_jobs.records import records_in
from rolloutd.adapters.kubernetes_jobs.report import PodResult
from rolloutd.adapters.kubernetes_jobs.runner import KubernetesRunner
from rolloutd.contracts import Work
from rolloutd.errors import NotFound, RunnerUnavailable
from rolloutd.ports import Failed, Ok, RunState, Unknown, wait_for_end
from tests.contracts.kubernetes_jobs.backend import NAMESPACE, JobsBackend, open_jobs_backend, shipped_rules
from tests.support.fake_kubernetes.errors import ApiRefusal
from tests.support.fake_kubernetes.server import ApiRequest
from tests.support.waiting import wait_in_loop_until

pytestmark = pytest.mark.servers

PLANTED = "planted-4f1b2c"
"""A secret among the node's variables."""


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[JobsBackend]:
    async with open_jobs_backend(tmp_path) as opened:
        yield opened


def job_of(backend: JobsBackend, run: str = "r1") -> Any:
    return backend.cluster.objects.get("jobs", NAMESPACE, objects.job_name(run))


async def ended(runner: KubernetesRunner, handle: str) -> RunState:
    async with asyncio.timeout(120.0):
        return await wait_for_end(runner, handle)


@pytest.mark.long
async def test_second_pod_is_refused_by_node(backend: JobsBackend) -> None:
    runner = backend.open()
    fenced = backend.request(Work.NEVER_ENDS, "r1", fencing_token="3.10 aaaa 1000")  # of a fence
    handle = await runner.start(fenced)
    await wait_in_loop_until(backend.ansible.has_work)
    second = backend.jobs.add_pod(job_of(backend))
    message = backend.jobs.place(second) / "message"
    await wait_in_loop_until(message.exists)
    assert "a newer run" in message.read_text()
    assert (await runner.get_state(handle)).result is None, "the first pod has the run"
    await runner.cancel(handle)


async def test_lost_beginning_of_log_is_an_event(backend: JobsBackend) -> None:
    runner = backend.open()
    handle = await runner.start(backend.request(Work.SUCCEEDS, "r1"))
    await wait_in_loop_until(lambda: backend.jobs.pods_of(objects.job_name("r1")))
    (pod,) = backend.jobs.pods_of(objects.job_name("r1"))
    backend.jobs.log_begins_at[pod["metadata"]["name"]] = 3
    assert isinstance((await ended(runner, handle)).result, Ok)
    texts = [event.text async for event in runner.read_events(handle)]
    assert "3 events are lost" in texts
    assert len(texts) == len(set(texts)), "each line once, though logs repeat"


async def test_late_job_is_adopted_and_reordered_log_read(backend: JobsBackend) -> None:
    """The server has answered 504, and creates the Job all the same; its log is out of order."""
    backend.jobs.is_log_reversed = True
    given_up: list[Any] = []

    def give_up(asked: ApiRequest) -> None:
        if (asked.verb, asked.resource) == ("create", "jobs") and not given_up:
            given_up.append(copy.deepcopy(asked.body))
            raise ApiRefusal(504, "Timeout: request did not complete", reason="Timeout")

    backend.cluster.server.interceptors.append(give_up)
    runner, request = backend.open(), backend.request(Work.SUCCEEDS, "r1")
    with pytest.raises(RunnerUnavailable):
        await runner.start(request)
    given_up[0]["metadata"]["namespace"] = NAMESPACE
    backend.cluster.objects.create("jobs", given_up[0])
    handle = await runner.start(request)
    assert isinstance((await ended(runner, handle)).result, Ok)
    assert len(list(backend.cluster.objects.all("jobs", NAMESPACE))) == 1
    assert backend.ansible.started_runs() == ["r1"]
    kinds = [event.kind async for event in runner.read_events(handle)]
    assert kinds[-1] == "stats", kinds
    assert "log" not in kinds, "nothing counts as lost"


async def test_unknown_result_does_not_turn(backend: JobsBackend) -> None:
    runner = backend.open()
    handle = await runner.start(backend.request(Work.NEVER_ENDS, "r1"))
    await wait_in_loop_until(backend.ansible.has_work)
    await backend.lose(handle)
    assert isinstance((await ended(runner, handle)).result, Unknown)
    (pod,) = backend.jobs.pods_of(objects.job_name("r1"))
    message = PodResult.of("r1", pod["metadata"]["uid"], 1, Ok("done")).message()
    status = pod["status"]["containerStatuses"][0]
    turned = {**status, "state": {"terminated": {"exitCode": 0, "message": message}}}
    backend.cluster.objects.modify(
        "pods", pod, lambda each: each["status"].update(phase="Succeeded", containerStatuses=[turned])
    )
    for each in (runner, backend.open()):
        assert isinstance((await each.get_state(handle)).result, Unknown)
    await runner.clean_up_stale_runs(backend.ansible.host(), timeout_s=2.0)


async def test_result_outlives_job(backend: JobsBackend) -> None:
    runner = backend.open()
    handle = await runner.start(backend.request(Work.SUCCEEDS, "r1"))
    result = (await ended(runner, handle)).result
    for pod in backend.jobs.pods_of(objects.job_name("r1")):
        backend.cluster.objects.remove("pods", pod)
    backend.cluster.objects.remove("jobs", job_of(backend))
    assert (await backend.open().get_state(handle)).result == result
    assert await runner.start(backend.request(Work.SUCCEEDS, "r1")) == handle
    assert backend.ansible.started_runs() == ["r1"]


async def test_nothing_secret_in_objects_and_logs(backend: JobsBackend) -> None:
    backend.ansible.connection["ansible_become_password"] = PLANTED
    runner = backend.open()
    request = backend.request(Work.SUCCEEDS, "r1")
    await ended(runner, await runner.start(request))
    for kind in ("jobs", "pods", "poddisruptionbudgets"):
        assert PLANTED not in repr(list(backend.cluster.objects.all(kind, NAMESPACE))), kind
    logs = list((backend.directory / "pods").glob("*/log"))
    records = [path for path in (backend.directory / "state").rglob("*") if path.is_file()]
    assert logs
    assert records
    assert not [path for path in (*logs, *records) if PLANTED.encode() in path.read_bytes()]
    secret = next(iter(backend.cluster.objects.all("secrets", NAMESPACE)))
    assert secret["immutable"]
    assert secret["metadata"]["ownerReferences"][0]["uid"] == job_of(backend)["metadata"]["uid"]


async def test_pod_has_no_rights_and_avoids_its_node(backend: JobsBackend) -> None:
    backend.jobs.may_start = False
    await backend.open().start(backend.request(Work.SUCCEEDS, "r1"))
    spec = job_of(backend)["spec"]
    pod, (container,) = spec["template"]["spec"], spec["template"]["spec"]["containers"]
    assert (spec["backoffLimit"], spec["podReplacementPolicy"], pod["restartPolicy"]) == (
        0,
        "Failed",
        "Never",
    )
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    affinity = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert affinity["nodeSelectorTerms"][0]["matchFields"][0]["values"] == ["n0"]


async def test_pod_without_image_never_began(backend: JobsBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.jobs.may_start = False
    runner = backend.open()
    handle = await runner.start(backend.request(Work.SUCCEEDS, "r1"))
    await wait_in_loop_until(lambda: backend.jobs.pods_of(objects.job_name("r1")))
    async with asyncio.timeout(60.0):
        while (state := await runner.get_state(handle)).task != "its pod waits: ImagePullBackOff":
            await runner.wait_for_change(handle) if state.result else await asyncio.sleep(0.2)
    monkeypatch.setattr(objects, "START_S", 0.0)
    result = (await ended(runner, handle)).result
    assert isinstance(result, Failed)
    assert result.code is FailureCode.NEVER_STARTED
    assert backend.jobs.pods_of(objects.job_name("r1")) == []


@pytest.mark.parametrize(
    ("text", "is_full"),
    [("jobs.batch is forbidden: exceeded quota: compute", True), ("admission webhook denied it", False)],
)
async def test_refused_job_is_no_failure(backend: JobsBackend, text: str, is_full: bool) -> None:
    def refuse(asked: ApiRequest) -> None:
        if (asked.verb, asked.resource) == ("create", "jobs"):
            raise ApiRefusal(403, text)

    backend.cluster.server.interceptors.append(refuse)
    with pytest.raises(RunnerUnavailable) as refused:
        await backend.open().start(backend.request(Work.SUCCEEDS, "r1"))
    assert refused.value.is_full is is_full


async def test_too_large_secret_never_starts(backend: JobsBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "MAX_SECRET_BYTES", 100)
    runner = backend.open()
    result = (await ended(runner, await runner.start(backend.request(Work.SUCCEEDS, "r1")))).result
    assert isinstance(result, Failed)
    assert result.code is FailureCode.NEVER_STARTED
    assert not list(backend.cluster.objects.all("jobs", NAMESPACE))


async def test_pod_that_does_not_end_is_unknown(
    backend: JobsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.jobs.may_start = False
    runner = backend.open()
    handle = await runner.start(backend.request(Work.SUCCEEDS, "r1"))
    await wait_in_loop_until(lambda: backend.jobs.pods_of(objects.job_name("r1")))
    monkeypatch.setattr(objects, "START_S", 0.0)
    monkeypatch.setattr(runner_module, "GONE_TIMEOUT_S", -1.0)
    result = (await ended(runner, handle)).result
    assert isinstance(result, Unknown), "it may begin before it is gone"


async def test_job_that_cluster_changed_is_removed(
    backend: JobsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drop_policy(asked: ApiRequest) -> None:
        if (asked.verb, asked.resource) == ("create", "jobs"):
            del asked.body["spec"]["podReplacementPolicy"]  # as a server below 1.29 does

    backend.cluster.server.interceptors.append(drop_policy)
    runner = backend.open()
    with monkeypatch.context() as slow:
        slow.setattr(backend.jobs, "_count", lambda *_: None)  # its removal takes a while
        for _ in range(2):
            with pytest.raises(RunnerUnavailable, match="podReplacementPolicy"):
                await runner.start(backend.request(Work.SUCCEEDS, "r1"))
    await wait_in_loop_until(lambda: not list(backend.cluster.objects.all("jobs", NAMESPACE)))


async def test_name_of_another_run_is_not_adopted(backend: JobsBackend) -> None:
    backend.jobs.may_start = False
    await backend.open().start(backend.request(Work.SUCCEEDS, "r1"))
    backend.cluster.objects.modify(
        "jobs", job_of(backend), lambda each: each["metadata"]["annotations"].update({objects.RUN: "other"})
    )
    with pytest.raises(RunnerUnavailable, match="another run has it"):
        await backend.open().start(backend.request(Work.SUCCEEDS, "r1"))


async def test_job_that_is_gone_is_unknown(backend: JobsBackend) -> None:
    backend.jobs.may_start = False
    runner = backend.open()
    handle = await runner.start(backend.request(Work.SUCCEEDS, "r1"))
    backend.cluster.objects.remove("jobs", job_of(backend))
    async with asyncio.timeout(60.0):
        while (state := await runner.get_state(handle)).result is None:
            await asyncio.sleep(0.2)
    assert isinstance(state.result, Unknown)
    assert isinstance((await backend.open().get_state(handle)).result, Unknown)


async def test_run_that_a_restored_database_forgot_begins_again(backend: JobsBackend) -> None:
    runner = backend.open()
    await ended(runner, await runner.start(backend.request(Work.SUCCEEDS, "r1")))
    before = job_of(backend)["metadata"]["uid"]
    (record,) = records_in(backend.directory / "state" / "runners" / "fra")
    record.forget()
    runner = backend.open()
    with pytest.raises(NotFound, match="older than the database"):
        await runner.get_state("r1")
    handle = await runner.start(backend.request(Work.SUCCEEDS, "r1"))
    assert job_of(backend)["metadata"]["uid"] != before
    assert isinstance((await ended(runner, handle)).result, Ok)


async def test_shipped_role_is_what_runs_use(backend: JobsBackend) -> None:
    runner = backend.open()
    assert await runner.find_missing_prerequisites() == []
    await runner.check_available()
    handle = await runner.start(backend.request(Work.SUCCEEDS, "r1"))
    await ended(runner, handle)
    await backend.open().get_state(handle)
    await runner.start(backend.request(Work.SUCCEEDS, "r2"))
    await backend.open().start(backend.request(Work.SUCCEEDS, "r2"))
    await runner.discard(handle)
    reviews = {("create", "selfsubjectaccessreviews")}
    used = {(each.verb, each.full_resource) for each in backend.cluster.server.requests} - reviews
    granted = {
        (verb, name) for rule in shipped_rules() for name in rule["resources"] for verb in rule["verbs"]
    }
    assert used == granted


async def test_place_is_that_of_cluster_not_of_file(backend: JobsBackend) -> None:
    place = backend.open().place
    text = backend.kubeconfig.read_text()
    backend.kubeconfig = backend.kubeconfig.rename(backend.directory / "moved")
    assert backend.open().place == place
    backend.kubeconfig.write_text("not yet: {")
    assert backend.open().place == place, "as it was, while the file cannot be read"
    backend.kubeconfig.write_text(text.replace(backend.cluster.url, "https://192.0.2.1"))
    assert backend.open().place != place


async def test_missing_right_is_named(backend: JobsBackend) -> None:
    rules = [rule for rule in shipped_rules() if rule["resources"] != ["secrets"]]
    backend.cluster.kubeconfig(backend.kubeconfig, token=backend.cluster.token(rules))
    (missing,) = await backend.open().find_missing_prerequisites()
    assert "may not create secrets, needed to give a run its variables" in missing


async def test_begun_run_without_pod_is_unknown(backend: JobsBackend) -> None:
    runner = backend.open()
    handle = await runner.start(backend.request(Work.NEVER_ENDS, "r1"))
    await wait_in_loop_until(backend.ansible.has_work)
    assert (await runner.get_state(handle)).result is None
    for pod in backend.jobs.pods_of(objects.job_name("r1")):  # as of a Job that is suspended
        backend.jobs.lose(objects.job_name("r1"))
        backend.cluster.objects.remove("pods", pod)
    assert isinstance((await ended(backend.open(), handle)).result, Unknown)


async def test_run_is_followed_after_takeover(backend: JobsBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new daemon has no record of the run, and expects work of another machine on the node."""
    request = backend.request(Work.NEVER_ENDS, "r1", fencing_token="3.10 aaaa 1000")  # of a fence
    await backend.open().start(request)
    await wait_in_loop_until(backend.ansible.has_work)
    runner = backend.open_elsewhere()
    assert (await runner.get_state("r1")).result is None
    later = backend.request(Work.NEVER_ENDS, "r1", fencing_token="4.11 aaaa 1060")  # of a fence
    assert await runner.start(later) == "r1"
    assert backend.ansible.has_work()
    monkeypatch.setattr(objects, "START_S", -runner_module.END_MARGIN_S)
    assert (await runner.get_state("r1")).result is None, "its own limit is not over"
    await runner.cancel("r1")


async def test_record_without_content_is_written_again(backend: JobsBackend) -> None:
    """The daemon was killed between the record's directory and its content."""
    (backend.directory / "state" / "runners" / "fra").mkdir(parents=True)
    (backend.directory / "state" / "runners" / "fra" / "r1").mkdir()
    runner = backend.open()
    with pytest.raises(NotFound):
        await runner.get_state("r1")
    assert isinstance(
        (await ended(runner, await runner.start(backend.request(Work.SUCCEEDS, "r1")))).result, Ok
    )
