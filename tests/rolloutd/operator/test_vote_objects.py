"""Votes as objects: counted once, only under the shipped policy, and each forgery refused with its reason."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from rolloutd.adapters.kubernetes.cluster import api_path
from rolloutd.operator.objects import GROUP_VERSION
from rolloutd.operator.vote_objects import (
    BINDING_SPEC,
    POLICY_NAME,
    POLICY_SPEC,
    VOTES,
    VoteCounter,
    VoteWatch,
)
from rolloutd.settings.operator import Operator
from tests.rolloutd.operator.test_controller import DEPLOY, Fleet, fleet
from tests.rolloutd.operator.test_votes import APPROVE, PEOPLE
from tests.support.fake_kubernetes.access import User
from tests.support.fake_kubernetes.objects import format_time
from tests.support.fake_kubernetes.schema import validate_fields

POLICY, BINDING = "validatingadmissionpolicies", "validatingadmissionpolicybindings"
OLD_S = -3600.0
SETTINGS = Operator.model_validate(
    {"cluster": "prod", "namespaces": {"ops": ["infra"]}, "people": PEOPLE, "vote_objects": True}
)


@dataclass
class Ballots:
    """People who create votes with their tokens, and a counter that a test lets act."""

    seen: Fleet
    counter: VoteCounter
    uid: str

    async def create(self, user: str, *, as_token_of: str | None = None, **more: Any) -> tuple[int, Any]:
        access = self.seen.kubernetes.access
        for name in (user, as_token_of or user):
            token = access.tokens[f"token-of-{name}"] = (
                APPROVE,
                {**APPROVE, "resources": [VOTES], "verbs": ["*"]},
            )
            access.users[f"token-of-{name}"] = User(name, rules=token)
        spec = {
            "rollout": "kernel",
            "rolloutUid": self.uid,
            "gate": "start",
            "digest": self.seen.status()["digest"],
            "choice": "yes",
            "voter": user,
            "reason": "read it",
        } | more
        body = {
            "apiVersion": GROUP_VERSION,
            "kind": "MaintenanceVote",
            "metadata": {"name": f"v{len(self.votes()) + 1}"},
            "spec": {key: value for key, value in spec.items() if value is not None},
        }
        url = self.seen.kubernetes.url + api_path(VOTES, namespace="ops", group=GROUP_VERSION)
        headers = {"Authorization": f"Bearer token-of-{as_token_of or user}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, data=json.dumps(body), headers=headers) as response,
        ):
            return response.status, await response.json()

    def votes(self) -> list[Any]:
        return list(self.seen.kubernetes.objects.all(VOTES, "ops"))

    async def count(self) -> Any:
        """Read the votes as the server has them; return the last one's status."""
        watch = VoteWatch("ops", self.counter)
        page = await self.seen.cluster.list(
            api_path(VOTES, namespace="ops", group=GROUP_VERSION), {}, watch.parse
        )
        watch.on_list(page.items)
        await self.counter.count()
        return self.votes()[-1].get("status")

    def restart(self) -> None:
        before = self.counter
        self.counter = VoteCounter(before.state, before.sources, before.cluster, before.settings)

    def counted(self) -> list[Any]:
        return [vote for each in self.seen.inside.state.index.rollouts.values() for vote in each.votes]

    def put_policy(self, resource: str, spec: Any, after_s: float = OLD_S) -> None:
        objects = self.seen.kubernetes.objects
        thing = objects.create(
            resource, {"metadata": {"name": POLICY_NAME}, "spec": json.loads(json.dumps(spec))}
        )
        created = format_time(after_s)
        objects.modify(resource, thing, lambda each: each["metadata"].update(creationTimestamp=created))

    def remove_policy(self, resource: str) -> None:
        objects = self.seen.kubernetes.objects
        objects.remove(resource, objects.get(resource, "", POLICY_NAME))


@asynccontextmanager
async def ballots(tmp_path: Path) -> AsyncIterator[Ballots]:
    async with fleet(tmp_path) as seen:
        uid = seen.apply()["metadata"]["uid"]
        await seen.act()
        counter = VoteCounter(seen.inside.state, seen.inside.sources, seen.cluster, SETTINGS)
        made = Ballots(seen, counter, uid)
        made.put_policy(POLICY, POLICY_SPEC)
        made.put_policy(BINDING, BINDING_SPEC)
        yield made


def test_shipped_policy_is_the_one_that_is_compared() -> None:
    found = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "votes.yaml").read_text())}
    assert found["ValidatingAdmissionPolicy"]["spec"] == POLICY_SPEC
    assert found["ValidatingAdmissionPolicyBinding"]["spec"] == BINDING_SPEC


async def test_vote_of_person_counts_once(tmp_path: Path) -> None:
    async with ballots(tmp_path) as made:
        assert (await made.create("oidc:olga@corp"))[0] == 201
        assert await made.count() == {"counted": True, "reason": ""}
        [vote] = made.counted()
        assert (vote.actor.name, vote.teams, vote.yes) == ("kubernetes:olga", ("infra",), True)
        made.restart()
        assert await made.count() == {"counted": True, "reason": ""}
        assert len(made.counted()) == 1
        audit = await made.seen.inside.request("olga", "get", "/v1/audit")
        assert "oidc:olga@corp" in json.dumps(audit)


async def test_refused_vote_does_not_count_later(tmp_path: Path) -> None:
    """Its voter was told that it does not count; what they did not read must not be approved by it."""
    async with ballots(tmp_path) as made:
        await made.create("oidc:olga@corp")
        known, made.counter.settings = made.counter.settings, SETTINGS.model_copy(update={"people": {}})
        refused = await made.count()
        assert (refused["counted"], "no person of the settings" in refused["reason"]) == (False, True)
        made.counter.settings = known
        made.restart()
        assert await made.count() == refused
        assert made.counted() == []


async def test_vote_in_another_name_is_not_created(tmp_path: Path) -> None:
    async with ballots(tmp_path) as made:
        status, body = await made.create("oidc:olga@corp", as_token_of="oidc:eve@corp")
        assert (status, "your own user name" in body["message"]) == (422, True)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"digest": "0" * 64}, "is for digest"),
        ({"rolloutUid": "of-another"}, "no open rollout"),
        ({"rollout": "elsewhere"}, "no open rollout"),
        ({"gate": "nosuch"}, "gate"),
        ({"choice": "perhaps"}, "give yes or no"),
        ({"digest": None}, "digest"),
        ({"reason": None}, "reason"),
        ({"voter": "oidc:eve@corp"}, "no person of the settings"),
        ({"voter": "system:serviceaccount:ops:argocd"}, "no person of the settings"),
    ],
)
async def test_wrong_vote_is_refused_with_reason(tmp_path: Path, more: Any, reason: str) -> None:
    async with ballots(tmp_path) as made:
        voter = more.get("voter", "oidc:olga@corp")
        assert (await made.create(voter, **more))[0] == 201
        status = await made.count()
        assert (status["counted"], reason in status["reason"]) == (False, True), status
        assert made.counted() == []


@pytest.mark.parametrize("resource", [POLICY, BINDING])
async def test_vote_without_policy_is_refused(tmp_path: Path, resource: str) -> None:
    async with ballots(tmp_path) as made:
        made.remove_policy(resource)
        assert (await made.create("oidc:olga@corp", as_token_of="oidc:eve@corp"))[0] == 201
        assert "missing" in (await made.count())["reason"]
        assert (await made.create("oidc:olga@corp", as_token_of="oidc:eve@corp"))[0] == 201
        # Put back afterwards: it was not there when the votes were made.
        made.put_policy(resource, POLICY_SPEC if resource == POLICY else BINDING_SPEC, after_s=0.0)
        made.restart()
        assert "not older than the vote" in (await made.count())["reason"]
        assert made.counted() == []


@pytest.mark.parametrize(
    ("resource", "change"),
    [
        (POLICY, {"failurePolicy": "Ignore"}),
        (POLICY, {"matchConditions": [{"name": "not-eve", "expression": "false"}]}),
        (POLICY, {"validations": POLICY_SPEC["validations"][:1]}),
        (BINDING, {"validationActions": ["Audit"]}),
        (BINDING, {"matchResources": {"namespaceSelector": {"matchLabels": {"a": "b"}}}}),
    ],
)
async def test_changed_policy_proves_nothing(tmp_path: Path, resource: str, change: Any) -> None:
    async with ballots(tmp_path) as made:
        objects = made.seen.kubernetes.objects
        shipped = objects.get(resource, "", POLICY_NAME)
        changed = {**shipped, "spec": {**shipped["spec"], **change}}
        now = objects.update(resource, shipped, changed, manager="mallory", subresource="")
        assert (await made.create("oidc:olga@corp"))[0] == 201
        assert "not as shipped" in (await made.count())["reason"]
        assert (await made.create("oidc:olga@corp"))[0] == 201
        objects.update(resource, now, {**now, "spec": shipped["spec"]}, manager="mallory", subresource="")
        made.restart()
        assert "was changed" in (await made.count())["reason"]
        assert made.counted() == []


@pytest.mark.parametrize("manifest", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.name)
def test_manifests_are_as_published_schema_says(manifest: Path) -> None:
    for document in yaml.safe_load_all(manifest.read_text()):
        if document["kind"] not in ("Kustomization", "CustomResourceStateMetrics"):  # files of other programs
            validate_fields(document["kind"], document)


async def test_silent_cluster_keeps_vote_waiting(tmp_path: Path) -> None:
    async with ballots(tmp_path) as made:
        await made.create("oidc:olga@corp")
        watch = VoteWatch("ops", made.counter)
        path = api_path(VOTES, namespace="ops", group=GROUP_VERSION)
        watch.on_list((await made.seen.cluster.list(path, {}, watch.parse)).items)
        await made.seen.kubernetes.stop()
        assert not await made.counter.count()
        await made.seen.kubernetes.start()
        assert await made.counter.count()
        assert len(made.counted()) == 1
