"""Plan files: judged, previewed, and opened as rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from machines.progress import progress
from rolloutd import planfile
from rolloutd.control import requests, wire
from rolloutd.control.answers import mistake_of
from rolloutd.control.finding import find
from rolloutd.control.previewing import preview
from rolloutd.control.routes import Call, Created, Desk, Route
from rolloutd.errors import InvalidFile
from rolloutd.orders import steering, submit
from rolloutd.planfile import PlanFile

ANY_TEAM = "members of the teams in the settings, and admins"


async def validate(desk: Desk, call: Call) -> wire.Validation:
    """Name every mistake of a plan file at once."""
    try:
        await _read(call.body)
    except InvalidFile as invalid:
        return {"valid": False, "errors": [mistake_of(mistake) for mistake in invalid.mistakes]}
    return {"valid": True, "errors": []}


async def preview_plan(desk: Desk, call: Call) -> wire.Preview:
    """Show what a plan would do."""
    body: requests.PlanWithSource = call.body
    steering.mind_trying(call.who)
    draft = await submit.draft(desk.state, desk.sources, body.file, body.text.encode(), body.upload)
    return preview(desk.state, draft, call.who.actor)


async def submit_plan(desk: Desk, call: Call) -> Created | wire.Submission:
    """Open a rollout that waits at its start gate, or name the one that this plan has."""
    body: requests.PlanToSubmit = call.body
    steering.mind_trying(call.who)
    file = await _read(body)
    _mind_owner(desk, call, file, takes_over=body.again or body.supersede)
    rollout, existing = await submit.submit(
        desk.state,
        desk.sources,
        body.file,
        body.text.encode(),
        body.upload,
        call.who.actor,
        again=body.again,
        supersede=body.supersede,
    )
    found = await find(desk.state, rollout)
    far = progress(found.index, rollout, desk.state.now())
    answer: wire.Submission = {
        "rollout": rollout,
        "digest": found.rollout.digest.whole,
        "state": far.state.value,
        "existing": existing,
    }
    return answer if existing else Created(answer)


async def upload(desk: Desk, call: Call) -> Created:
    """Keep a tree of playbooks under its content hash."""
    steering.mind_trying(call.who)
    pinned = await desk.sources.keep_upload(call.content)
    answer: wire.Upload = {"upload": pinned.pin}
    return Created(answer)


async def _read(body: requests.PlanFile) -> PlanFile:
    # A plan of a megabyte takes its time; the loop goes on meanwhile.
    return await asyncio.to_thread(planfile.read, body.text.encode(), body.file)


def _mind_owner(desk: Desk, call: Call, file: PlanFile, *, takes_over: bool) -> None:
    """Refuse who may not submit for the plan's owner, or end the rollout that it would take over from."""
    metadata = file.content["metadata"]
    if metadata["owner"] in desk.state.settings.teams:
        steering.mind_submitting(call.who, metadata["owner"])
    if not takes_over:
        return
    for rollout in desk.state.index.rollouts.values():
        if rollout.plan.name == metadata["name"] and not rollout.closed:
            steering.mind_steering(call.who, rollout, "take over from")


ROUTES: Sequence[Route] = (
    Route(
        "POST",
        "/v1/plans/validate",
        validate,
        "Name every mistake of a plan",
        wire.Validation,
        body=requests.PlanFile,
    ),
    Route(
        "POST",
        "/v1/plans/preview",
        preview_plan,
        "What a plan would do",
        wire.Preview,
        body=requests.PlanWithSource,
        who=ANY_TEAM,
    ),
    Route(
        "POST",
        "/v1/plans/submit",
        submit_plan,
        "Open a rollout",
        wire.Submission,
        body=requests.PlanToSubmit,
        creates=True,
        who="members of the team that metadata.owner names, and admins",
    ),
    Route(
        "POST",
        "/v1/uploads",
        upload,
        "Keep a tree of playbooks under its content hash",
        wire.Upload,
        content="application/x-tar",
        creates=True,
        who=ANY_TEAM,
    ),
)
