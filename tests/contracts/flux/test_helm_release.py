"""What is done and failed of a HelmRelease: an attempt is no proof."""

from __future__ import annotations

import json
from dataclasses import replace

from rolloutd.ports import Failed, Ok, RunRequest
from tests.contracts.flux.environment import CREATE, NEWER, FluxEnvironment, ended, until_says
from tests.contracts.flux.environment import GOOD as COMMIT
from tests.support.flux_controllers import Content

GOOD, BAD = (f"sha256:{digit * 64}" for digit in "ab")
RELEASE = ("helmreleases", "east-db")


def request(env: FluxEnvironment, run: str, digest: str, previous: str = "") -> RunRequest:
    env.flux.content |= {GOOD: Content.GOOD, BAD: Content.UNHEALTHY}
    found = env.request(
        run,
        "",
        previous=previous,
        helm_release="east-db",
        oci={"url": "oci://registry.example/db", "digest": digest},
        values={"size": "3"},
        create=CREATE,
    )
    params = {key: value for key, value in found.params.items() if key != "kustomization"}
    return RunRequest(
        run, found.host, found.source, "", timeout_s=300.0, kind="flux", params=params, previous=previous
    )


async def test_deployed_chart_of_the_digest_is_done(env: FluxEnvironment) -> None:
    runner = env.open_runner()
    state = await ended(runner, await runner.start(request(env, "r1", GOOD)))
    assert isinstance(state.result, Ok), state.result
    (applied,) = env.flux.applied["east-db"]
    assert (applied.revision, applied.values) == (f"latest@{GOOD}", (("size", "3"),))


async def test_chart_of_git_is_done_by_its_commit(env: FluxEnvironment) -> None:
    runner = env.open_runner()
    given = {"helm_release": "east-db", "chart": "./charts/db", "values": {"size": "3"}, "create": CREATE}
    for name, pin in (("r1", COMMIT), ("r2", NEWER)):
        asked = replace(env.request(name, pin), params=given)
        previous = await runner.read_previous(asked)
        assert isinstance((await ended(runner, await runner.start(asked))).result, Ok)
    assert [each.revision for each in env.flux.applied["east-db"]] == [f"sha1:{COMMIT}", f"sha1:{NEWER}"]
    chart = (await env.fleet.get(*RELEASE))["spec"]["chart"]["spec"]
    assert (chart["chart"], chart["reconcileStrategy"]) == ("./charts/db", "Revision")
    assert json.loads(previous)["pin"] == COMMIT
    undo = replace(env.request("r3", NEWER, previous=previous), params=given)
    assert isinstance((await ended(runner, await runner.start(undo))).result, Ok)
    assert env.flux.applied["east-db"][-1].revision == f"sha1:{COMMIT}"


async def test_release_that_undid_itself_failed(env: FluxEnvironment) -> None:
    """lastAttemptedRevision is the new chart, and the history has it; what is deployed is the old one."""
    runner = env.open_runner()
    await ended(runner, await runner.start(request(env, "r1", GOOD)))
    asked = request(env, "r2", BAD)
    previous = await runner.read_previous(asked)
    state = await ended(runner, await runner.start(asked))
    assert isinstance(state.result, Failed), state.result
    assert "RollbackSucceeded" in state.result.text
    assert json.loads(previous)["pin"] == GOOD
    state = await ended(runner, await runner.start(request(env, "r3", BAD, previous)))
    assert isinstance(state.result, Ok), state.result
    assert env.flux.applied["east-db"][-1].revision == f"latest@{GOOD}"


async def test_ready_of_chart_before_is_not_done(env: FluxEnvironment) -> None:
    runner = env.open_runner()
    await ended(runner, await runner.start(request(env, "r1", GOOD)))
    other = f"sha256:{'c' * 64}"
    env.flux.content[other] = Content.GOOD
    env.flux.is_running.clear()
    await runner.start(request(env, "r2", other))
    await until_says(runner, "r2", "no controller has fetched it yet")
    env.flux.is_running.set()
    assert isinstance((await ended(runner, "r2")).result, Ok)
    status = (await env.fleet.get(*RELEASE))["status"]
    assert status["history"][0]["ociDigest"] == other
