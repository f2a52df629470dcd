"""Votes as objects: MaintenanceVote, proven by an admission policy of the cluster.

No field of an object says who created it.  So the object names its voter, and a policy lets no user create
one in another's name.  A vote counts only while that policy is the shipped one, unchanged and older than the
vote.  An admin of the cluster can forge one all the same: policies are not subject to policies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Final

from pydantic import ValidationError

from machines.model.plan import GateName
from rolloutd.adapters.kubernetes import api_errors
from rolloutd.adapters.kubernetes.cluster import DEFAULT_DOMAIN, FIELD_MANAGER, Cluster, api_path
from rolloutd.adapters.kubernetes.list_watch import WatchHandler, run_list_watch
from rolloutd.commands import voting
from rolloutd.commands.execution import UserCommand, execute
from rolloutd.commands.resolve import resolve_for_reading
from rolloutd.control.plans.review import not_shown_to_voter
from rolloutd.control.responses import describe_validation_error
from rolloutd.control.votes.vote_requests import CastVote
from rolloutd.engine.state import State
from rolloutd.errors import NotAllowed, NotFound, Refused, RolloutdError, StoreFailed
from rolloutd.operator.objects import APPLY_PATCH, GROUP_VERSION, RESOURCE
from rolloutd.operator.people import person_of, submitter_name
from rolloutd.ports import JSON, SourceStore
from rolloutd.settings.operator import Operator

log = logging.getLogger(__name__)

VOTES: Final = "maintenancevotes"
VOTE_KIND: Final = "MaintenanceVote"
POLICY_NAME: Final = f"rolloutd-votes.{DEFAULT_DOMAIN}"
ADMISSION_GROUP: Final = "admissionregistration.k8s.io/v1"

POLICY_SPEC: Final[Mapping[str, JSON]] = {
    "failurePolicy": "Fail",
    "matchConstraints": {
        "matchPolicy": "Equivalent",
        "namespaceSelector": {},
        "objectSelector": {},
        "resourceRules": [
            {
                "apiGroups": [DEFAULT_DOMAIN],
                "apiVersions": ["v1"],
                "operations": ["CREATE", "UPDATE"],
                "resources": [VOTES],
                "scope": "*",
            }
        ],
    },
    "validations": [
        # Metadata may change: who deletes in the foreground makes the garbage collector remove a finalizer.
        {
            "expression": "request.operation == 'CREATE' || object.spec == oldObject.spec",
            "message": "a vote never changes; create another",
        },
        {
            "expression": "request.operation != 'CREATE' || object.spec.voter == request.userInfo.username",
            "message": "spec.voter must be your own user name (kubectl auth whoami)",
        },
        {
            "expression": "request.operation != 'CREATE' || "
            f"authorizer.group('{DEFAULT_DOMAIN}').resource('{RESOURCE}')"
            ".namespace(request.namespace).name(object.spec.rollout).check('approve').allowed()",
            "message": "you may not approve this rollout",
        },
    ],
}
"""The policy with every default of the server: what is there must be equal, so that nothing is exempt."""

BINDING_SPEC: Final[Mapping[str, JSON]] = {"policyName": POLICY_NAME, "validationActions": ["Deny"]}

POLICY_SETTLES_S = 60.0
"""How long after its creation a policy may not be in force at each API server."""

RETRY_S = 30.0
"""When a vote is read again after the cluster or the store did not answer."""

MAX_VOTES = 10_000
"""Votes of one namespace that are read; more is the mistake of a script."""

MAX_REASON_CHARS = 500
"""Characters of the sentence in a vote's status."""


@dataclass(frozen=True, slots=True)
class VoteObject:
    """The used fields of a MaintenanceVote; `is_refused` by its status, which the daemon alone writes."""

    namespace: str
    name: str
    uid: str
    created_at: float
    spec: Mapping[str, JSON]
    is_refused: bool = False

    @property
    def token(self) -> str:
        """What makes it count once, even after a withdrawal and a restart."""
        return f"kubernetes/{self.uid}"

    @property
    def status_path(self) -> str:
        return api_path(VOTES, self.name, namespace=self.namespace, group=GROUP_VERSION, subresource="status")


@api_errors.malformed_answers()
def parse_vote(obj: Mapping[str, JSON]) -> VoteObject:
    meta = obj["metadata"]
    return VoteObject(
        api_errors.require_text(meta["namespace"]),
        api_errors.require_text(meta["name"]),
        api_errors.require_text(meta["uid"]),
        datetime.fromisoformat(api_errors.require_text(meta["creationTimestamp"])).timestamp(),
        dict(obj.get("spec") or {}),
        (obj.get("status") or {}).get("counted") is False,
    )


class VoteWatch(WatchHandler):
    def __init__(self, namespace: str, counter: VoteCounter) -> None:
        self.namespace = namespace
        self._counter = counter

    def parse(self, obj: Mapping[str, JSON]) -> VoteObject:
        return parse_vote(obj)

    def on_list(self, objects: Sequence[VoteObject]) -> None:
        for each in objects[:MAX_VOTES]:
            self._counter.add(each)

    def on_event(self, kind: str, obj: Mapping[str, JSON]) -> None:
        if kind != "DELETED":
            self._counter.add(parse_vote(obj))

    def on_connected(self) -> None:
        self._counter.report(self.namespace, "")

    def on_disconnected(self, reason: str) -> None:
        self._counter.report(self.namespace, reason)


@dataclass(slots=True)
class VoteCounter:
    """Counts each vote once, and writes to its status whether it counted and why not."""

    state: State
    sources: SourceStore
    cluster: Cluster
    settings: Operator
    _waiting: dict[str, VoteObject] = field(default_factory=dict)
    _judged: dict[str, None] = field(default_factory=dict)
    _woken: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, vote: VoteObject) -> None:
        # One that was refused stays refused: its voter has seen that, and has read nothing that came later.
        if vote.uid not in self._judged and not vote.is_refused:
            self._waiting[vote.uid] = vote
            self._woken.set()

    def report(self, namespace: str, problem: str) -> None:
        """Show in the daemon's status that the votes of a namespace cannot be read."""
        key = f"operator votes {namespace}"
        if problem:
            self.state.conditions[key] = f"operator: votes of {namespace}: {problem}"
        else:
            self.state.conditions.pop(key, None)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for namespace in self.settings.namespaces:
                path = api_path(VOTES, namespace=namespace, group=GROUP_VERSION)
                tasks.create_task(run_list_watch(self.cluster, path, {}, VoteWatch(namespace, self)))
            tasks.create_task(self._count_for_ever())

    async def _count_for_ever(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            if not await self.count():
                await asyncio.sleep(RETRY_S)
                self._woken.set()

    async def count(self) -> bool:
        """Judge the votes that wait; return whether all could be."""
        for vote in tuple(self._waiting.values()):
            try:
                await self._write_status(vote, await self._judge(vote))
            except (api_errors.ApiError, api_errors.ClusterUnreachable, StoreFailed) as error:
                log.warning("vote %s/%s: %s; it is read again", vote.namespace, vote.name, error)
                continue
            except Exception:
                # One object must not keep the others from being read, nor end the daemon.
                log.exception("vote %s/%s: not read", vote.namespace, vote.name)
            del self._waiting[vote.uid]
            self._judged[vote.uid] = None
            while len(self._judged) > MAX_VOTES:
                del self._judged[next(iter(self._judged))]
        return not self._waiting

    async def _judge(self, vote: VoteObject) -> str:
        """Count a vote; return why it does not count, "" if it does."""
        if await self.state.store.is_token_used(vote.token):
            return ""
        try:
            await self._cast(vote)
        except (api_errors.ApiError, api_errors.ClusterUnreachable, StoreFailed):
            raise
        except RolloutdError as error:
            log.warning("vote %s/%s: not counted: %s", vote.namespace, vote.name, error)
            return str(error)
        log.info("vote %s/%s: counted", vote.namespace, vote.name)
        return ""

    async def _cast(self, vote: VoteObject) -> None:
        voter, body = str(vote.spec.get("voter") or ""), _body_of(vote.spec)
        await self._require_proof(vote)
        who = await person_of(voter, self.settings, self.state.settings)
        resolved = await resolve_for_reading(self.state, self._rollout_of(vote))
        if body.yes:
            voting.require_named_gate(resolved.rollout, GateName(body.gate), body.wave)
        ballot = body.ballot(resolved.rollout)
        not_shown = await not_shown_to_voter(self.state, self.sources, resolved, ballot)
        decide = partial(voting.vote, ballot=ballot, not_shown=not_shown)
        cause = f"vote {vote.namespace}/{vote.name}: {body.reason}"
        await execute(self.state, who, UserCommand(cause, decide, resolved, token=vote.token, outside=voter))

    def _rollout_of(self, vote: VoteObject) -> str:
        """Return the open rollout of the object that the vote names; raises NotFound."""
        name, uid = (str(vote.spec.get(key) or "") for key in ("rollout", "rolloutUid"))
        submitted = submitter_name(self.cluster.name, vote.namespace, name, uid)
        for each in self.state.index.rollouts.values():
            if each.submitted_by.name == submitted and not each.closed:
                return each.id
        raise NotFound(f"spec.rolloutUid: {name} with uid {uid} has no open rollout; read it and vote again")

    async def _require_proof(self, vote: VoteObject) -> None:
        """Raise NotAllowed unless the shipped policy was in force when the vote was made."""
        for resource, wanted in (
            ("validatingadmissionpolicies", POLICY_SPEC),
            ("validatingadmissionpolicybindings", BINDING_SPEC),
        ):
            subject = f"{resource} {POLICY_NAME}"
            try:
                found = await self.cluster.get(api_path(resource, POLICY_NAME, group=ADMISSION_GROUP))
            except api_errors.ApiError as error:
                if error.status == 404:
                    raise NotAllowed(f"{subject}: missing; apply it, then vote again") from None
                raise
            with api_errors.malformed_answers():
                meta = found["metadata"]
                created_at = datetime.fromisoformat(
                    api_errors.require_text(meta["creationTimestamp"])
                ).timestamp()
                generation = int(meta.get("generation") or 1)
            if found.get("spec") != wanted:
                raise NotAllowed(f"{subject}: not as shipped; delete it and apply it again")
            # Changed and put back: what was admitted in between is not known.
            if generation != 1:
                raise NotAllowed(f"{subject}: was changed; delete it and apply it again")
            if vote.created_at < created_at + POLICY_SETTLES_S:
                raise NotAllowed(f"{subject}: not older than the vote by a minute; vote again")

    async def _write_status(self, vote: VoteObject, problem: str) -> None:
        metadata = {"name": vote.name, "namespace": vote.namespace, "uid": vote.uid}
        status = {"counted": not problem, "reason": problem[:MAX_REASON_CHARS]}
        body = {"apiVersion": GROUP_VERSION, "kind": VOTE_KIND, "metadata": metadata, "status": status}
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        try:
            await self.cluster.request(
                "PATCH", vote.status_path, query=query, body=body, content_type=APPLY_PATCH
            )
        except api_errors.ApiError as error:
            if error.status not in (404, 409):  # gone, or another of its name
                raise


def _body_of(spec: Mapping[str, JSON]) -> CastVote:
    """Return a vote's content; raises Refused."""
    choice = spec.get("choice")
    if choice not in ("yes", "no"):
        raise Refused("choice", f"spec.choice: {str(choice)[:20]!r}; give yes or no")
    if not spec.get("digest"):
        raise Refused("digest", "spec.digest: missing; give that of the rollout that you read")
    keys = ("gate", "reason", "team", "wave", "digest", "shown", "unseen")
    fields = {key: spec[key] for key in keys if spec.get(key) is not None}
    try:
        return CastVote.model_validate({**fields, "yes": choice == "yes"})
    except ValidationError as error:
        raise Refused("vote", f"spec: {describe_validation_error(error)}") from None
