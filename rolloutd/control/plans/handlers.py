"""Handlers of plan files: validate, preview, submit, upload, and the plan of a rollout."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

from machines.model.timefmt import format_duration
from machines.scheduler.progress import rollout_progress
from rolloutd import planfile
from rolloutd.commands import rollout_commands, submit, verdicts
from rolloutd.commands.resolve import resolve_for_reading, resolve_rollout
from rolloutd.concurrency import threads
from rolloutd.configuration.shown_variables import shown_plan
from rolloutd.control import requests, rights
from rolloutd.control.nodes import wire_nodes
from rolloutd.control.nodes.reports import report_lines
from rolloutd.control.plans import plan_serializers, wire_plans
from rolloutd.control.plans.preview import forecast_draft, preview
from rolloutd.control.plans.review import review
from rolloutd.control.responses import diagnostic_body
from rolloutd.control.rollouts import serializers
from rolloutd.control.routes import Created, Request, RouteTable, Services
from rolloutd.engine.forecasts import Forecaster
from rolloutd.engine.tasks import compute
from rolloutd.errors import InvalidFile, RolloutdError
from rolloutd.forecast.request import Draft
from rolloutd.planfile import PlanFile
from rolloutd.planfile.prepare_source import ForcedStages

routes = RouteTable()

log = logging.getLogger(__name__)

DRAWS = 50
"""Draws of a preview: they cost less than the walk, and its p90 is off by some 4 % of the draws."""

TIME_LIMIT_S = 10.0
"""Time that a preview waits for its forecast; 2,000 nodes take a second or two of an idle core."""

MONTH_S = 30 * 86_400.0


@routes.add("GET", "/v1/rollouts/{r}/plan", on_standby=True)
async def plan(services: Services, request: Request) -> wire_plans.PlanContent:
    """Show a rollout's plan in its canonical form."""
    state = services.state
    found = (await resolve_for_reading(state, request.path_params["r"])).rollout
    content, source = await state.store.load_plan(found.id)
    digest = found.digest
    return {
        "content": shown_plan(content, state.redaction_key, state.settings.show_vars),
        "source": serializers.source(source),
        "digest": digest.whole,
        "hashes": plan_serializers.hashes(digest),
    }


@routes.add("POST", "/v1/plans/validate")
async def validate(services: Services, request: Request[requests.PlanText]) -> wire_plans.Validation:
    """List every mistake in a plan file."""
    try:
        await read_plan(request.input)
    except InvalidFile as invalid:
        return {"valid": False, "errors": [diagnostic_body(mistake) for mistake in invalid.diagnostics]}
    return {"valid": True, "errors": []}


@routes.add("POST", "/v1/plans/preview", access=rights.ANY_TEAM_MEMBER)
async def preview_plan(services: Services, request: Request[requests.PlanWithUpload]) -> wire_plans.Preview:
    """Show what a plan would do."""
    body = request.input
    plan_file = await read_plan(body)
    draft = await submit.resolve_plan(services.state, services.sources, plan_file, body.upload)
    # In a thread: ten thousand targets take longer than the loop may pause.
    answer = await compute(
        preview, services.state.settings, draft, request.identity.actor, services.state.now()
    )
    for verdict in await verdicts.matching_verdicts(services.state, submit.draft_of(draft)):
        answer["warnings"].append(f"{verdicts.describe(verdict)} (verdict {verdict.id})")
    opened = await compute(forecast_draft, draft, request.identity, plan_file.content, services.state.now())
    answer["forecast"] = await plan_duration(services.forecaster, opened)
    return answer


@routes.add("POST", "/v1/plans/impact", access=rights.PLAN_SUBMITTER)
async def plan_impact(
    services: Services, request: Request[requests.PlanWithUpload]
) -> AsyncGenerator[wire_nodes.ImpactLine, None]:
    """Stream what check mode would change on each target of a plan."""
    body = request.input
    plan_file = await read_plan(body)
    # Check mode executes the plan's playbooks, as a rollout does.
    _require_owner(services, request, plan_file)
    draft = await submit.resolve_plan(services.state, services.sources, plan_file, body.upload)
    return report_lines(
        services.check_mode.check(target.node, draft.pinned, draft.plan) for target in draft.targets
    )


@routes.add("POST", "/v1/plans/submit", access=rights.PLAN_SUBMITTER)
async def submit_plan(
    services: Services, request: Request[requests.SubmitPlan]
) -> Created[wire_plans.Submission] | wire_plans.Submission:
    """Open a rollout, or return the one that this plan has."""
    body = request.input
    plan_file = await read_plan(body)
    _require_owner(services, request, plan_file)
    submitted = await submit.submit(
        services.state,
        services.sources,
        plan_file,
        body.upload,
        request.identity,
        again=body.again,
        supersede=body.supersede,
        overrides=submit.Overrides(tuple(body.override_verdicts), body.reason or ""),
        force=ForcedStages(tuple(body.force_stages), tuple(body.force_nodes)),
    )
    resolved = await resolve_rollout(services.state, submitted.rollout)
    current = rollout_progress(resolved.index, submitted.rollout, services.state.now())
    submission: wire_plans.Submission = {
        "rollout": submitted.rollout,
        "digest": resolved.rollout.digest.whole,
        "state": current.state.value,
        "existing": submitted.existing,
        "superseded": list(submitted.superseded),
    }
    return submission if submitted.existing else Created(submission)


@routes.add("GET", "/v1/rollouts/{r}/review")
async def review_rollout(services: Services, request: Request) -> wire_plans.Review:
    """Show what a voter reads: the change, its differences, the checks, and what an approval starts."""
    resolved = await resolve_for_reading(services.state, request.path_params["r"])
    return await review(services.state, services.sources, resolved, request.identity)


@routes.add("POST", "/v1/uploads", upload_type="application/x-tar", access=rights.ANY_TEAM_MEMBER)
async def upload(services: Services, request: Request) -> Created[wire_plans.UploadResponse]:
    """Store a tree of playbooks under its content hash."""
    pinned = await services.sources.store_upload(request.upload)
    response: wire_plans.UploadResponse = {"upload": pinned.pin}
    return Created(response)


async def read_plan(body: requests.PlanText) -> PlanFile:
    """Read a plan file; raises InvalidFile."""
    # In a thread: reading a plan of a megabyte would block the loop.
    return await threads.COMPUTATIONS.run(planfile.read, body.text.encode(), body.file)


def _require_owner(services: Services, request: Request[object], plan_file: PlanFile) -> None:
    """Raise NotAllowed unless the caller may submit for the owner."""
    owner = plan_file.content["metadata"]["owner"]
    if owner in services.state.settings.teams:
        rollout_commands.require_member(request.identity, owner, f"submit a plan of {owner}")


async def plan_duration(forecaster: Forecaster, draft: Draft) -> wire_plans.PlanDuration | None:
    """Return how long a plan takes as if it were submitted now; None where no forecast is ready in time."""
    try:
        async with asyncio.timeout(TIME_LIMIT_S):
            (answer,) = await forecaster.ask(forecaster.request(draft=draft, draws=DRAWS, seed=1))
    except (TimeoutError, RolloutdError) as error:
        log.info("preview: no forecast: %s", str(error) or f"not ready within {TIME_LIMIT_S:.0f} s")
        return None
    found: wire_plans.PlanDuration = {
        "ends_at": answer["ends_at"],
        "work_s": answer["work_s"],
        "bottleneck": answer["bottleneck"],
        "train": answer["train"],
        "assumptions": answer["assumptions"],
        "warning": None,
    }
    found["warning"] = _warning(found)
    return found


def _warning(found: wire_plans.PlanDuration) -> str | None:
    """Return why a month is too short for the plan, None if it is not."""
    took_s, bottleneck = found["work_s"]["p50"], found["bottleneck"]
    if took_s is None:
        return "duration: as it is the plan never ends; see rolloutctl forecast"
    if took_s <= MONTH_S:
        return None
    cause = "" if bottleneck is None else f" at {bottleneck['kind']} {bottleneck['name']}"
    took = format_duration(took_s - took_s % 3600.0)
    return f"duration: it takes {took}, longer than a month; widen the windows or allow more at once{cause}"
