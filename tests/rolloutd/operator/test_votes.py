"""Votes with the cluster's tokens: who may, whose vote it is, and what is refused with its reason."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rolloutd.cli.kubectl_plugin import main as kubectl_rolloutd
from rolloutd.control.client import ApiError
from rolloutd.operator.votes import VoteServer, serve_votes
from rolloutd.settings.operator import Operator
from tests.rolloutd.control_environment import PLAN
from tests.rolloutd.fleetlock.test_fleetlock import make_certificates
from tests.rolloutd.operator.test_controller import Fleet, fleet
from tests.support.fake_kubernetes.access import ALL_RULES, User
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
APPROVE = {"apiGroups": ["rolloutd.io"], "resources": ["maintenancerollouts"], "verbs": ["get", "approve"]}
READ = {**APPROVE, "verbs": ["get"]}
PEOPLE = {"oidc:olga@corp": "olga", "oidc:oscar@corp": "oscar", "oidc:paul@corp": "paul"}


@dataclass
class Voters:
    """Users of the cluster who ask the daemon with their tokens."""

    seen: Fleet
    session: aiohttp.ClientSession
    base: str
    tokens: dict[str, str] = field(default_factory=dict)

    def user(self, name: str, *rules: Any, **more: Any) -> str:
        token = f"token-of-{name}"
        self.seen.kubernetes.access.users[token] = User(name, rules=rules or (APPROVE,), **more)
        return token

    async def vote(self, token: str | None, name: str = "kernel", **body: Any) -> tuple[int, Any]:
        digest = self.seen.status().get("digest")
        wanted = {"gate": "start", "yes": True, "reason": "read it", "digest": digest} | body
        return await self.ask("POST", f"/v1/rollouts/ops/{name}/votes", token, json.dumps(wanted))

    async def ask(self, method: str, path: str, token: str | None, body: str = "") -> tuple[int, Any]:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        url = self.base + path
        async with self.session.request(method, url, headers=headers, data=body) as response:
            return response.status, json.loads(await response.read())


@asynccontextmanager
async def voters(tmp_path: Path) -> AsyncIterator[Voters]:
    certificates = await asyncio.to_thread(make_certificates, tmp_path)
    address = f"127.0.0.1:{free_port()}"
    async with fleet(tmp_path) as seen:
        votes = {
            "listen": address,
            "tls": {"cert": f"{tmp_path}/server.pem", "key": f"{tmp_path}/server.key"},
        }
        settings = Operator.model_validate(
            {"cluster": "prod", "namespaces": {"ops": ["infra"]}, "people": PEOPLE, "votes": votes}
        )
        assert settings.votes is not None
        inside = seen.inside
        server = VoteServer(inside.state, inside.sources, seen.cluster, settings)
        trusted = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        connector = aiohttp.TCPConnector(ssl=trusted)
        async with (
            serve_votes(server, settings.votes),
            aiohttp.ClientSession(connector=connector) as session,
        ):
            seen.apply()
            await seen.act()
            yield Voters(seen, session, f"https://{address}")


def votes_of(voters: Voters) -> list[Any]:
    [rollout] = voters.seen.inside.state.index.rollouts.values()
    return list(rollout.votes)


async def test_person_of_cluster_opens_gate(tmp_path: Path) -> None:
    async with voters(tmp_path) as people:
        token = people.user("oidc:olga@corp")
        status, body = await people.ask("GET", "/v1/rollouts/ops/kernel", token)
        assert status == 200
        assert body["rollout"]["digest"] == people.seen.status()["digest"]
        assert (await people.vote(token))[0] == 200
        [vote] = votes_of(people)
        assert (vote.actor.name, vote.actor.kind.value, vote.teams) == (
            "kubernetes:olga",
            "service",
            ("infra",),
        )
        entries = await people.seen.inside.request("olga", "get", "/v1/audit")
        assert "oidc:olga@corp" in json.dumps(entries)
        # The same person by the daemon's own socket is not a second one.
        [rollout] = people.seen.rollouts()
        with pytest.raises(ApiError, match="you voted already"):
            await people.seen.inside.vote("olga", rollout, "start")


async def test_submitter_in_person_is_one_across_issuers(tmp_path: Path) -> None:
    async with voters(tmp_path) as people:
        plan = (await people.seen.inside.request("olga", "get", "/v1/status"))["rollouts"][0]["rollout"]
        await people.seen.inside.request("olga", "post", f"/v1/rollouts/{plan}/cancel", {"reason": "mine"})
        rollout = await people.seen.inside.submit("olga")
        index = people.seen.inside.state.index
        assert index.rollouts[rollout].submitted_by.name == "olga"
        # The object shows a person's rollout only if it submitted it itself: votes by its name find none.
        status, body = await people.vote(people.user("oidc:olga@corp"))
        assert (status, body["code"]) == (404, "not-found")


async def test_unproven_votes_are_refused(tmp_path: Path) -> None:
    async with voters(tmp_path) as people:
        olga = people.user("oidc:olga@corp")
        for token, code, text in (
            (None, 401, "no bearer token"),
            ("forged", 401, "not valid for rolloutd"),
            (people.user("oidc:oscar@corp", audiences=("elsewhere",)), 401, "not valid for rolloutd"),
            (people.user("oidc:eve@corp"), 403, "no person of the settings"),
            (people.user("system:serviceaccount:ops:argocd"), 403, "no person of the settings"),
            (people.user("oidc:paul@corp"), 403, "may not vote at start"),
        ):
            status, body = await people.vote(token)
            assert status == code, body
            assert text in body["error"]
        reader = people.user("oidc:olga@corp", READ)
        assert reader == olga
        status, body = await people.vote(reader)
        assert (status, "may not approve ops/kernel" in body["error"]) == (403, True)
        assert votes_of(people) == []


async def test_vote_for_old_digest_is_refused(tmp_path: Path) -> None:
    async with voters(tmp_path) as people:
        token = people.user("oidc:olga@corp")
        status, body = await people.vote(token, digest="0" * 64)
        assert (status, body["code"]) == (409, "other-digest")
        status, body = await people.vote(token, digest=None)
        assert (status, "digest is missing" in body["error"]) == (400, True)
        assert votes_of(people) == []


async def test_vote_for_object_made_again_counts_for_new_rollout_alone(tmp_path: Path) -> None:
    async with voters(tmp_path) as people:
        token = people.user("oidc:olga@corp")
        assert (await people.vote(token))[0] == 200
        people.seen.remove()
        people.seen.apply()
        await people.seen.act()
        [rollout] = people.seen.rollouts()
        assert people.seen.inside.state.index.rollouts[rollout].votes == ()


async def test_silent_cluster_takes_no_vote(tmp_path: Path) -> None:
    async with voters(tmp_path) as people:
        token = people.user("oidc:olga@corp")
        await people.seen.kubernetes.stop()
        status, body = await people.vote(token)
        assert (status, body["code"]) == (503, "cluster")
        await people.seen.kubernetes.start()
        assert votes_of(people) == []


async def test_kubectl_plugin_votes_with_token_of_kubeconfig(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with voters(tmp_path) as people:
        token = people.user("oidc:olga@corp")
        kubeconfig = people.seen.kubernetes.kubeconfig(tmp_path / "of-olga", token=token)
        shared = ("kernel", "-n", "ops", "--kubeconfig", str(kubeconfig), "--ca-file", f"{tmp_path}/ca.pem")
        server = ("--server", people.base.removeprefix("https://"))
        assert await asyncio.to_thread(kubectl_rolloutd, ("show", *shared, *server)) == 0
        assert people.seen.status()["digest"] in capsys.readouterr().out
        words = ("approve", *shared, *server, "start", "--reason", "read it")
        assert await asyncio.to_thread(kubectl_rolloutd, words) == 0
        assert "yes at start as kubernetes:olga" in capsys.readouterr().out
        assert await asyncio.to_thread(kubectl_rolloutd, words) == 1
        assert "you voted already" in capsys.readouterr().err
        assert len(votes_of(people)) == 1
        unknown_authority = (*shared[:-2], *server)
        assert await asyncio.to_thread(kubectl_rolloutd, ("show", *unknown_authority)) == 1
        assert "; check --server and --ca-file" in capsys.readouterr().err
        assert await asyncio.to_thread(kubectl_rolloutd, ("show", *shared)) == 1
        assert "--server: not given" in capsys.readouterr().err


async def test_kubectl_plugin_sends_failures_that_it_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with voters(tmp_path) as people:
        token = people.user("oidc:olga@corp")
        rollout = await people.seen.open_start()
        await people.seen.inside.fail(rollout, "p1")
        kubeconfig = people.seen.kubernetes.kubeconfig(tmp_path / "of-olga", token=token)
        shared = ("-n", "ops", "--kubeconfig", str(kubeconfig), "--ca-file", f"{tmp_path}/ca.pem")
        server = ("--server", people.base.removeprefix("https://"))
        words = ("approve", "kernel", "proceed", *shared, *server, "--reason", "known")
        assert await asyncio.to_thread(kubectl_rolloutd, words) == 0
        assert "failed: p1: run.configure: broken" in capsys.readouterr().out
        assert votes_of(people)[-1].shown == ("p1#1",)


async def test_kubectl_plugin_explains_nodes_of_namespace_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with voters(tmp_path) as people:
        reader = people.user("oidc:rita@corp", {**READ, "verbs": ["list"]})
        stranger = people.user("oidc:max@corp")
        server = ("--ca-file", f"{tmp_path}/ca.pem", "--server", people.base.removeprefix("https://"))

        async def why(token: str, node: str, namespace: str = "ops") -> int:
            kubeconfig = people.seen.kubernetes.kubeconfig(tmp_path / "of-someone", token=token)
            words = ("why", node, "-n", namespace, "--kubeconfig", str(kubeconfig), *server)
            return await asyncio.to_thread(kubectl_rolloutd, words)

        assert await why(reader, "p1") == 0
        assert "kernel: p1 is pending: " in capsys.readouterr().out
        assert await why(stranger, "p1") == 1
        assert "may not list ops/maintenancerollouts" in capsys.readouterr().err
        assert await why(reader, "p1", "others") == 1
        assert "in no open rollout of namespace others" in capsys.readouterr().err
        assert await why(reader, "no-such-node") == 1


@pytest.mark.servers("kubectl")
async def test_documented_kubectl_commands_run(tmp_path: Path) -> None:
    text = (ROOT / "docs/kubernetes-rollouts.md").read_text()
    commands = [shlex.split(line) for line in re.findall(r"^\$ (kubectl .*)$", text, re.MULTILINE)]
    kernel = re.findall(r"kernel-[\d-]+", text)[0]
    async with voters(tmp_path) as people:
        kubernetes = people.seen.kubernetes
        kubernetes.access.anonymous = ALL_RULES  # kubectl sends no token without TLS
        people.seen.apply(kernel, PLAN.replace("name: sysctl", "name: other"))
        await people.seen.act()
        kubeconfig = kubernetes.kubeconfig(tmp_path / "of-olga", token=people.user("oidc:olga@corp"))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {"PATH": path, "HOME": str(tmp_path), "KUBECONFIG": str(kubeconfig)}
        environment |= {"ROLLOUTD_VOTES": people.base.removeprefix("https://")}
        environment |= {"ROLLOUTD_VOTES_CA": f"{tmp_path}/ca.pem"}

        def run(words: Sequence[str]) -> str:
            # The fake publishes no schema, and a watch does not end.
            more = ["--validate=false"] if words[1] == "apply" else []
            done = [word for word in words if word != "-w"] + more
            ended = subprocess.run(done, cwd=ROOT, env=environment, capture_output=True, text=True)
            return "" if ended.returncode == 0 else f"{shlex.join(done)}: {ended.stderr}"

        failed = [await asyncio.to_thread(run, words) for words in commands]
        assert "".join(failed) == ""
        assert len(commands) >= 6
        kinds = ("customresourcedefinitions", "roles", "clusterroles", "validatingadmissionpolicies")
        assert all(list(kubernetes.objects.all(kind)) for kind in kinds)
