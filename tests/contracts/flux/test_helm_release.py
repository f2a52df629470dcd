"""What is done and failed of a HelmRelease: an attempt is no proof."""

from __future__ import annotations

import json

from rolloutd.ports import Failed, Ok, RunRequest
from tests.contracts.flux.environment import CREATE, FluxEnvironment, ended, until_says
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
