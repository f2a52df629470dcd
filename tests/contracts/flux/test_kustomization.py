"""What is done, failed and unknown of a Kustomization, with each status that misleads."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace

import pytest

from machines.model.rollout import FailureCode
from rolloutd.adapters.clusters.object_store import ObjectRef
from rolloutd.adapters.flux.runner import FluxRunner
from rolloutd.adapters.flux.unused_sources import USED
from rolloutd.errors import AdapterFailed, NotFound, RunnerUnavailable
from rolloutd.ports import Failed, Ok, Unknown
from tests.contracts.flux.environment import (
    BAD,
    CREATE,
    ENDLESS,
    GOOD,
    NEWER,
    SICK,
    URL,
    FluxEnvironment,
    ended,
    until_says,
)
from tests.support.flux_controllers import Content

APPS = ("kustomizations", "east-apps")


async def run(env: FluxEnvironment, name: str, pin: str = GOOD, **more: object) -> Ok | Failed | Unknown:
    runner = env.open_runner()
    state = await ended(runner, await runner.start(env.request(name, pin, **more)))  # type: ignore[arg-type]
    assert state.result is not None
    return state.result


async def test_pinned_commit_is_applied_and_healthy(env: FluxEnvironment) -> None:
    result = await run(env, "r1", values={"region": "eu"})
    assert isinstance(result, Ok), result
    assert "applied and healthy" in result.text
    (applied,) = env.flux.applied["east-apps"]
    assert (applied.revision, applied.values, applied.run) == (f"sha1:{GOOD}", (("region", "eu"),), "r1")
    spec = (await env.fleet.get(*APPS))["spec"]
    assert spec["kubeConfig"] == {"secretRef": {"name": "east-kubeconfig"}}


async def test_next_pin_is_not_done_by_ready_of_last(env: FluxEnvironment) -> None:
    """Ready is True, of the commit before, while the controller does not run."""
    await run(env, "r1")
    env.flux.is_running.clear()
    runner = env.open_runner()
    source_is_there = asyncio.create_task(runner.start(env.request("r2", NEWER)))
    await source_is_there
    await until_says(runner, "r2", "no controller has fetched it yet")
    env.flux.is_running.set()
    assert isinstance((await ended(runner, "r2")).result, Ok)
    assert [each.revision for each in env.flux.applied["east-apps"]] == [f"sha1:{GOOD}", f"sha1:{NEWER}"]


async def test_changed_value_needs_its_own_generation(env: FluxEnvironment) -> None:
    """The applied revision is equal before and after."""
    await run(env, "r1", values={"replicas": "1"})
    env.flux.is_running.clear()
    runner = env.open_runner()
    await runner.start(env.request("r2", values={"replicas": "2"}))
    await until_says(runner, "r2", "no controller has judged generation 2")
    env.flux.is_running.set()
    assert isinstance((await ended(runner, "r2")).result, Ok)
    assert env.flux.applied["east-apps"][-1].values == (("replicas", "2"),)


async def test_failed_build_fails(env: FluxEnvironment) -> None:
    result = await run(env, "r1", BAD)
    assert isinstance(result, Failed)
    assert (result.code, "BuildFailed" in result.text) == (FailureCode.FAILED, True)


async def test_failed_health_check_fails_though_objects_are_new(env: FluxEnvironment) -> None:
    await run(env, "r1")
    result = await run(env, "r2", SICK)
    assert isinstance(result, Failed)
    assert "HealthCheckFailed" in result.text
    status = (await env.fleet.get(*APPS))["status"]
    assert status["lastAppliedRevision"] == f"sha1:{GOOD}"
    assert status["lastAttemptedRevision"] == f"sha1:{SICK}"


async def test_failure_counts_once_it_lasts(env: FluxEnvironment) -> None:
    """The controller tries again by itself, and may succeed."""
    runner = env.open_runner()
    env.flux.unreachable.add("east-kubeconfig")
    await runner.start(env.request("r1", failing_for=300.0))
    await until_says(runner, "r1", "ReconciliationFailed")
    env.flux.unreachable.clear()
    await env.fleet.edit(*APPS, {"metadata": {"annotations": {"reconcile.fluxcd.io/requestedAt": "now"}}})
    assert isinstance((await ended(runner, "r1")).result, Ok)


async def test_endless_health_check_ends_at_time_limit(env: FluxEnvironment) -> None:
    result = await run(env, "r1", ENDLESS, timeout_s=1.0)
    assert isinstance(result, Failed)
    assert result.text.startswith("time limit 1 s: Kustomization")


async def test_controller_that_does_not_run_is_bound_by_time(env: FluxEnvironment) -> None:
    await run(env, "r1")
    env.flux.is_running.clear()
    result = await run(env, "r2", values={"a": "b"}, timeout_s=1.0)
    assert isinstance(result, Failed)
    assert "no controller has judged generation 2 yet" in result.text


async def test_suspended_object_is_waited_for(env: FluxEnvironment) -> None:
    """It keeps Ready, and its observedGeneration is advanced without an apply."""
    await run(env, "r1")
    runner = env.open_runner()
    await env.fleet.edit(*APPS, {"spec": {"suspend": True}})
    await runner.start(env.request("r2", NEWER))
    await until_says(runner, "r2", "is suspended; resume it")
    assert (await env.fleet.get(*APPS))["metadata"]["annotations"]["rolloutd.io/run"] == "r1"
    await env.fleet.edit(*APPS, {"spec": {"suspend": False}})
    assert isinstance((await ended(runner, "r2")).result, Ok)


async def test_object_suspended_during_run_is_not_done(env: FluxEnvironment) -> None:
    await run(env, "r1")
    env.flux.is_running.clear()
    runner = env.open_runner()
    await runner.start(env.request("r2", values={"a": "b"}))
    generation = (await env.fleet.edit(*APPS, {"spec": {"suspend": True}}))["metadata"]["generation"]
    await env.flux.until_seen(*APPS, generation)
    env.flux.is_running.set()
    while (await env.fleet.get(*APPS))["status"]["observedGeneration"] != generation:
        await asyncio.sleep(0.02)
    await until_says(runner, "r2", "is suspended; resume it")
    assert len(env.flux.applied["east-apps"]) == 1
    await env.fleet.edit(*APPS, {"spec": {"suspend": False}})
    assert isinstance((await ended(runner, "r2")).result, Ok)


async def test_health_that_nobody_checks_is_said(env: FluxEnvironment) -> None:
    result = await run(env, "r1", create={**CREATE, "wait": False})
    assert isinstance(result, Ok)
    assert "its health is not checked" in result.text


async def test_missing_commit_touches_no_cluster(env: FluxEnvironment) -> None:
    """A force-pushed branch has lost the commit."""
    await run(env, "r1")
    del env.flux.content[NEWER]
    result = await run(env, "r2", NEWER, timeout_s=1.0)
    assert isinstance(result, Failed)
    assert (result.code, "object not found" in result.text) == (FailureCode.NEVER_STARTED, True)
    assert (await env.fleet.get(*APPS))["metadata"]["annotations"]["rolloutd.io/run"] == "r1"


async def test_source_that_comes_later_is_waited_for(env: FluxEnvironment) -> None:
    del env.flux.content[NEWER]
    runner = env.open_runner()
    await runner.start(env.request("r1", NEWER))
    await until_says(runner, "r1", "object not found")
    assert await env.fleet.find(*APPS) is None
    env.flux.content[NEWER] = Content.GOOD
    await env.flux.fetch_again()
    assert isinstance((await ended(runner, "r1")).result, Ok)


async def test_edit_by_a_person_is_named_and_stays(env: FluxEnvironment) -> None:
    env.flux.is_running.clear()
    runner = env.open_runner()
    env.flux.is_running.set()
    handle = await runner.start(env.request("r1", ENDLESS))
    await until_says(runner, handle, "Progressing")
    await env.fleet.edit(*APPS, {"spec": {"path": "./mine"}})
    result = (await ended(runner, handle)).result
    assert isinstance(result, Failed)
    assert result.code is FailureCode.INTERFERENCE
    assert "kubectl changed spec.path" in result.text
    assert (await env.fleet.get(*APPS))["spec"]["path"] == "./mine"


async def test_field_of_another_writer_is_not_forced(env: FluxEnvironment) -> None:
    """A parent Kustomization manages the object, with another source."""
    source = {"kind": "GitRepository", "name": "theirs"}
    await env.fleet.create(*APPS, {"sourceRef": source, "path": "./", "interval": "10m", "prune": True})
    result = await run(env, "r1")
    assert isinstance(result, Failed)
    assert (result.code, "kubectl" in result.text) == (FailureCode.NEVER_STARTED, True)
    assert (await env.fleet.get(*APPS))["spec"]["sourceRef"]["name"] == "theirs"


async def test_field_that_another_writer_adds_survives(env: FluxEnvironment) -> None:
    await run(env, "r1")
    await env.fleet.edit(*APPS, {"spec": {"force": True}})
    assert isinstance(await run(env, "r2", NEWER), Ok)
    assert (await env.fleet.get(*APPS))["spec"]["force"] is True


async def test_deleted_object_is_made_again(env: FluxEnvironment) -> None:
    runner = env.open_runner()
    env.flux.is_running.set()
    await runner.start(env.request("r1", ENDLESS))
    await until_says(runner, "r1", "Progressing")
    env.flux.content[ENDLESS] = Content.GOOD
    await env.fleet.delete(*APPS)
    assert isinstance((await ended(runner, "r1")).result, Ok)
    assert "r1" in (await env.fleet.get(*APPS))["metadata"]["annotations"]["rolloutd.io/run"]


async def test_object_that_plan_does_not_create_must_exist(env: FluxEnvironment) -> None:
    result = await run(env, "r1", create=None)
    assert isinstance(result, Failed)
    assert (result.code, "does not exist" in result.text) == (FailureCode.NEVER_STARTED, True)


async def test_cancel_follows_no_more_and_deletes_nothing(env: FluxEnvironment) -> None:
    runner = env.open_runner()
    await runner.start(env.request("r1", ENDLESS))
    await until_says(runner, "r1", "Progressing")
    await runner.cancel("r1")
    result = (await runner.get_state("r1")).result
    assert isinstance(result, Failed)
    assert (result.code, "what it applied stays" in result.text) == (FailureCode.INTERFERENCE, True)
    assert (await env.fleet.get(*APPS))["metadata"]["annotations"]["rolloutd.io/run"] == "r1"
    assert env.flux.pruned == []


async def test_rollback_restores_reference_and_values(env: FluxEnvironment) -> None:
    await run(env, "r1", values={"a": "1", "b": "2"})
    runner, request = env.open_runner(), env.request("r2", SICK, values={"a": "9"})
    previous = await runner.read_previous(request)
    assert isinstance((await ended(runner, await runner.start(request))).result, Failed)
    source = (await env.fleet.get(*APPS))["spec"]["sourceRef"]["name"]
    # The source of the revision before may be gone by then.
    await env.fleet.delete("gitrepositories", json.loads(previous)["spec"]["sourceRef"]["name"])
    assert isinstance(await run(env, "r3", SICK, previous=previous), Ok)
    restored = (await env.fleet.get(*APPS))["spec"]
    assert restored["sourceRef"]["name"] != source
    last = env.flux.applied["east-apps"][-1]
    assert (last.revision, last.values) == (f"sha1:{GOOD}", (("a", "1"), ("b", "2")))


async def test_source_is_removed_once_nothing_needs_it(env: FluxEnvironment) -> None:
    """The source before the latest rollout stays for a rollback, and those of others always."""
    ref = {"ref": {"commit": GOOD}, "url": URL, "interval": "1h"}
    await env.fleet.create("gitrepositories", "rolloutd-theirs", ref)
    runner = env.open_runner()

    async def roll(rollout: str, pin: str, **values: str) -> None:
        asked = replace(env.request(f"{rollout}{len(values)}", pin, values=values), rollout=rollout)
        assert isinstance((await ended(runner, await runner.start(asked))).result, Ok)

    async def sources_left() -> list[str]:
        for each in await runner.list_artifacts():
            if each.name.startswith("source="):
                assert not await runner.remove(each.name, unmodified_since=each.modified_at - 1.0)
                await runner.remove(each.name, unmodified_since=each.modified_at)
        listed = await env.fleet.list("gitrepositories")
        return sorted(each["spec"]["ref"]["commit"][0] for each in listed)

    await roll("A", GOOD)
    await roll("B", NEWER)
    assert await sources_left() == ["a", "a", "b"]
    # A second attempt of a rollout is undone to the state before its first one.
    await roll("B", NEWER, a="b")
    assert await sources_left() == ["a", "a", "b"]
    await roll("C", NEWER, a="c")
    assert await sources_left() == ["a", "b"], "only the foreign one of a is left"


async def test_source_that_run_prepares_again_stays(env: FluxEnvironment) -> None:
    await run(env, "r1")
    runner = env.open_runner()
    (old,) = [each for each in await runner.list_artifacts() if each.name.startswith("source=")]
    store = runner._store(env.host.connection)
    original = store.get

    async def overtaken(ref: ObjectRef) -> object:
        found = await original(ref)
        await env.fleet.edit("gitrepositories", ref.name, {"metadata": {"annotations": {USED: "9999999999"}}})
        return found

    store.get = overtaken  # type: ignore[method-assign, assignment]
    await env.fleet.delete(*APPS)
    assert not await runner.remove(old.name, unmodified_since=old.modified_at)
    assert len(await env.fleet.list("gitrepositories")) == 1


async def test_rollback_to_nothing_is_refused(env: FluxEnvironment) -> None:
    runner = env.open_runner()
    previous = await runner.read_previous(env.request("r1"))
    await run(env, "r1")
    result = await run(env, "r2", previous=previous)
    assert isinstance(result, Failed)
    assert "there was no object before" in result.text
    assert (await env.fleet.get(*APPS))["spec"]["sourceRef"]


async def test_run_is_applied_once(env: FluxEnvironment) -> None:
    first, second, elsewhere = env.open_runner(), env.open_runner(), env.open_runner("two")
    request = env.request("r1", token="3.10 a 1")
    assert len(set(await asyncio.gather(first.start(request), second.start(request)))) == 1
    assert isinstance((await ended(first, "r1")).result, Ok)
    # Another machine has no record, and finds the run by its object.
    assert isinstance((await ended(elsewhere, "r1")).result, Ok)
    assert env.flux.contents_of_run.keys() == {"r1"}
    assert len(env.flux.contents_of_run["r1"]) == 1
    with pytest.raises(NotFound):
        await elsewhere.get_state("never-was")


async def test_run_of_other_machine_keeps_its_limit(env: FluxEnvironment) -> None:
    first, elsewhere = env.open_runner(), env.open_runner("two")
    await first.start(env.request("r1", ENDLESS, timeout_s=4.0))
    await until_says(first, "r1", "Progressing")
    result = (await ended(elsewhere, "r1")).result
    assert isinstance(result, Failed)
    assert result.text.startswith("time limit 4 s")


async def test_run_of_other_machine_keeps_its_parameters(env: FluxEnvironment) -> None:
    """They are in the request, which the new daemon has as soon as it starts the run."""
    first, runner = env.open_runner(), env.open_runner("two")
    await first.start(env.request("r1", BAD, failing_for=300.0))
    await until_says(first, "r1", "BuildFailed")
    assert (await runner.get_state("r1")).result is None
    await runner.start(env.request("r1", BAD, failing_for=0.0))
    result = (await ended(runner, "r1")).result
    assert isinstance(result, Failed)
    assert "BuildFailed" in result.text


async def test_older_token_changes_nothing(env: FluxEnvironment) -> None:
    passing = {"r1": ("3.10", GOOD, True), "r2": ("3.9", NEWER, False), "r3": ("4.1", NEWER, True)}
    for name, (number, pin, passes) in passing.items():
        result = await run(env, name, pin, token=f"{number} a 1")
        assert isinstance(result, Ok if passes else Failed), (name, result)
    assert [each.run for each in env.flux.applied["east-apps"]] == ["r1", "r3"]


async def test_write_that_watch_has_not_seen_is_not_taken_over(env: FluxEnvironment) -> None:
    """A second run with the same fields leaves the generation as it was."""
    await run(env, "r1")
    runner = env.open_runner()
    store, ref = (
        runner._store(env.host.connection),
        runner.object_of(env.host.connection, env.request("").params),
    )
    behind = await store.get(ref)

    async def watched(_: ObjectRef) -> object:
        return behind

    store.watched = watched  # type: ignore[method-assign, assignment]
    assert isinstance((await ended(runner, await runner.start(env.request("r2")))).result, Ok)


async def test_tokens_of_two_databases_are_compared_by_time(env: FluxEnvironment) -> None:
    """A daemon that lost its state counts from the beginning, and must not be refused for ever."""
    passing = {"r1": ("3.10 a 1000", True), "r2": ("1.5 b 2000", True), "r3": ("9.1 a 1500", False)}
    for name, (token, passes) in passing.items():
        result = await run(env, name, token=token)
        assert isinstance(result, Ok if passes else Failed), (name, result)
    assert (await env.fleet.get(*APPS))["metadata"]["annotations"]["rolloutd.io/run"] == "r2"


async def test_write_without_its_record_is_no_run_that_never_started(env: FluxEnvironment) -> None:
    """A rollback restores what was there before the first run that may have changed something."""
    runner, request = env.open_runner(), env.request("r1", ENDLESS, timeout_s=1.0)
    await runner.start(request)
    await until_says(runner, "r1", "Progressing")
    record = env.directory / "one" / "runners" / "flux" / "r1.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "applied": None}))
    await env.fleet.edit(*APPS, {"spec": {"suspend": True}})
    result = (await ended(env.open_runner(), "r1")).result
    assert isinstance(result, Failed)
    assert (result.code, "is suspended" in result.text) == (FailureCode.FAILED, True)


async def test_write_between_read_and_apply_is_seen(env: FluxEnvironment) -> None:
    """A later run writes while the earlier one is between its read and its write."""
    await run(env, "r1", token="3.1 a 1")
    stale, current = env.open_runner(), env.open_runner("two")
    store = stale._store(env.host.connection)
    original = store._own

    async def overtaken(*args: object) -> object:
        result = await ended(current, await current.start(env.request("r3", NEWER, token="4.1 a 1")))
        assert isinstance(result.result, Ok)
        store._own = original  # type: ignore[method-assign]
        return await original(*args)  # type: ignore[arg-type]

    store._own = overtaken  # type: ignore[method-assign, assignment]
    await stale.start(env.request("r2", SICK, token="3.2 a 1"))
    result = (await ended(stale, "r2")).result
    assert isinstance(result, Failed)
    assert "a later run has the object" in result.text
    assert [each.run for each in env.flux.applied["east-apps"]] == ["r1", "r3"]


async def test_silent_server_is_waited_for(env: FluxEnvironment) -> None:
    await run(env, "r1")
    runner = env.open_runner()
    kubeconfig = env.kubeconfig.read_text()
    env.kubeconfig.write_text(kubeconfig.replace("127.0.0.1:", "127.0.0.1:1"))
    await runner.check_available()
    assert list(await runner.find_part_problems()) == ["clusterapi/hub"]
    with pytest.raises(RunnerUnavailable) as raised:
        await runner.start(env.request("r2", NEWER))
    assert (raised.value.part, "hub" in str(raised.value)) == ("clusterapi/hub", True)
    env.kubeconfig.write_text(kubeconfig)
    # The first call finds that the credentials have changed.
    assert list(await runner.find_part_problems()) == ["clusterapi/hub"]
    assert list(await runner.find_part_problems()) == []
    assert isinstance((await ended(runner, await runner.start(env.request("r2", NEWER)))).result, Ok)


async def test_digest_of_secret_follows_its_value(env: FluxEnvironment) -> None:
    path = f"/api/v1/namespaces/{env.fleet.namespace}/secrets"
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "east-values"}}
    await env.fleet.api.post(path, {**secret, "data": {"password": "c2VjcmV0"}})
    runner = env.open_runner()
    assert isinstance(runner, FluxRunner)
    digest = await runner.digest_secret(env.host, "east-values", "password")
    assert digest == hashlib.sha256(b"secret").hexdigest()
    for name, key in (("east-values", "other"), ("missing", "password")):
        with pytest.raises(AdapterFailed, match=name):
            await runner.digest_secret(env.host, name, key)
    await env.fleet.api.delete(f"{path}/east-values")


async def test_secret_is_a_reference_and_its_digest(env: FluxEnvironment) -> None:
    secret = {"secret": "east-values", "key": "password", "digest": "d" * 64}
    assert isinstance(await run(env, "r1", values={"password": secret}), Ok)
    build = (await env.fleet.get(*APPS))["spec"]["postBuild"]
    (reference,) = build["substituteFrom"]
    assert (reference["kind"], reference["name"]) == ("Secret", "east-values")
    assert isinstance(await run(env, "r2", values={"password": {**secret, "digest": "e" * 64}}), Ok)
    assert len({each.values for each in env.flux.applied["east-apps"]}) == 2


async def test_ended_runs_are_not_kept_in_memory(env: FluxEnvironment) -> None:
    """Each look at a run would count those of months."""
    runner = env.open_runner()
    for name in ("r1", "r2"):
        assert isinstance((await ended(runner, await runner.start(env.request(name)))).result, Ok)
    await runner.start(env.request("r3", ENDLESS))
    assert len([each for each in await runner.list_artifacts() if "source=" not in each.name]) == 3
    assert [each async for each in runner.read_events("r1")]
    assert not await runner.remove("r2", unmodified_since=0.0)
    assert (list(runner._records), runner.status.active) == (["r3"], 1)
    assert isinstance((await runner.get_state("r1")).result, Ok)
    await runner.cancel("r3")
    assert (list(runner._records), runner.status.active) == ([], 0)


async def test_events_are_read_from_an_offset(env: FluxEnvironment) -> None:
    await run(env, "r1")
    runner = env.open_runner()
    events = [each async for each in runner.read_events("r1")]
    assert "applied and healthy" in events[-1].text
    assert [each async for each in runner.read_events("r1", events[0].offset)] == events[1:]
    await runner.discard("r1")
    assert [each.name for each in await runner.list_artifacts() if "source=" not in each.name] == []
