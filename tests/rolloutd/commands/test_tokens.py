"""Votes that services carry: signed, used once, for one digest, and no back door for the submitter."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from machines.model.events import GateOpened, PilotEvidenceAttached, VoteCast
from machines.model.plan import GateName
from machines.model.rollout import Actor, ActorKind, PilotEvidence, Vote
from rolloutd.commands import tokens
from rolloutd.control.client import ApiError
from rolloutd.control.identity import Account
from rolloutd.store import open_store
from tests.rolloutd.control_environment import ACCOUNTS, PLAN, URL, ControlEnvironment, control_environment

SECRET = b"0123456789abcdef0123456789abcdef"
FOUR_EYES_PLAN = PLAN.replace("start: {owner: 1}", "start: {owner: 1, four_eyes: true}")
TWO = PLAN.replace("start: {owner: 1}", "start: {owner: 2}")


def services(tmp_path: Path, **more: Any) -> dict[str, Any]:
    """Return the settings of one service, and write its key."""
    key_file = tmp_path / "jira.key"
    key_file.touch(mode=0o600)
    key_file.write_bytes(SECRET)
    return {"jira": {"key_file": str(key_file), "teams": ["infra"], **more}}


def claims(inside: ControlEnvironment, named: str, **more: Any) -> dict[str, Any]:
    """Return a payload for a yes at start."""
    return {
        "service": "jira",
        "rollout": named,
        "gate": "start",
        "digest": inside.state.index.rollout(named).digest.whole,
        "answer": "yes",
        "outside": "zoe@example.com",
        "expires": inside.clock.now() + 900,
        "nonce": secrets.token_urlsafe(18),
        "reason": "CHG-4711",
        **more,
    }


async def use(inside: ControlEnvironment, rollout: str, token: str, who: str = "nora") -> Any:
    """Hand a token in."""
    return await inside.request(who, "post", f"/v1/rollouts/{rollout}/votes/token", {"token": token})


async def refusal(inside: ControlEnvironment, rollout: str, token: str, who: str = "nora") -> str:
    """Return why a token is refused, once it was seen that nothing has changed but the audit."""
    before = inside.state.index.snapshot()
    seq = inside.state.changes.latest_seq
    with pytest.raises(ApiError) as answer:
        await use(inside, rollout, token, who)
    assert answer.value.status == 403, answer.value.body
    assert inside.state.index.snapshot() == before
    entries = await inside.state.store.read_audit(after=seq)
    assert all('"event":"RequestDenied"' in entry.text for entry in entries)
    inside.clock.advance(61)  # the next refusal is told by itself
    return str(answer.value)


async def test_a_token_is_a_vote_and_equal_in_the_audit(tmp_path: Path) -> None:
    async with control_environment(tmp_path, service_accounts=services(tmp_path)) as inside:
        rollout = await inside.submit()
        said = claims(inside, rollout)
        gate = await use(inside, rollout, tokens.sign(said, SECRET))
        assert gate["state"] == "open"
        (vote,) = gate["votes"]
        assert (vote["by"], vote["reason"], vote["counts"]) == ("jira:zoe@example.com", "CHG-4711", True)
        (entry,) = (await inside.request("nora", "get", "/v1/audit?kind=VoteCast"))["entries"]
        assert entry["entry"]["actor"] == {"kind": "service", "name": "jira:zoe@example.com", "uid": 1007}
        assert entry["entry"]["digest"] == said["digest"]
        assert entry["entry"]["fields"]["outside"] == "zoe@example.com"
        assert entry["entry"]["fields"]["token"] == f"jira:{said['nonce']}"


async def test_a_token_at_start_is_for_the_evidence_of_the_pilot(tmp_path: Path) -> None:
    async with control_environment(tmp_path, service_accounts=services(tmp_path)) as inside:
        rollout = await inside.submit(text=PLAN.replace("  soak:", "  pilot: {node: p1}\n  soak:"))
        now, whole = inside.clock.now(), inside.state.index.rollout(rollout).digest.whole
        voter = Actor(ActorKind.PERSON, "olga", 1001)
        yes = Vote("v", GateName.PILOT, whole, voter, True, "", now, ("infra", "payments"))
        await inside.commit(VoteCast(rollout, yes))
        await inside.commit(GateOpened(rollout, GateName.PILOT, "", now))
        await inside.finish(rollout, "p1")
        since = inside.state.index.target(rollout, "p1").since
        await inside.commit(PilotEvidenceAttached(rollout, "p1", PilotEvidence({}, "e" * 64, since, since)))
        unread = tokens.sign(claims(inside, rollout), SECRET)
        assert f"for {whole}, but start of {rollout} is for {'e' * 64}" in await refusal(
            inside, rollout, unread
        )
        gate = await use(inside, rollout, tokens.sign(claims(inside, rollout, digest="e" * 64), SECRET))
        assert gate["state"] == "open"


@pytest.mark.parametrize("answer", ["yes", "no"])
async def test_a_yes_at_continue_names_its_wave_where_several_have_the_gate(
    tmp_path: Path, answer: str
) -> None:
    """A token that is used late would count at the next gate, whose results its signer has not seen."""
    waves = "  waves: [{name: first, select: 'rack=r1', gate: continue}]\n  soak:"
    async with control_environment(tmp_path, service_accounts=services(tmp_path)) as inside:
        rollout = await inside.start(text=PLAN.replace("  soak:", waves))
        for node in ("p1", "s1"):
            await inside.finish(rollout, node)
        token = tokens.sign(claims(inside, rollout, gate="continue", answer=answer), SECRET)
        if answer == "no":
            assert (await use(inside, rollout, token))["wave"] == "canary"
            return
        with pytest.raises(ApiError, match="continue without a wave; name one of canary, first"):
            await use(inside, rollout, token)
        named = tokens.sign(claims(inside, rollout, gate="continue", wave="canary"), SECRET)
        assert (await use(inside, rollout, named))["wave"] == "canary"


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_token_counts_once(tmp_path: Path, kind: str) -> None:
    async def sqlite(compiled: Any) -> Any:
        return await open_store(tmp_path / "state", compile_plan=compiled)

    store = sqlite if kind == "sqlite" else None
    async with control_environment(tmp_path, store=store, service_accounts=services(tmp_path)) as inside:
        rollout = await inside.submit(text=TWO)
        token = tokens.sign(claims(inside, rollout), SECRET)
        await use(inside, rollout, token)
        assert "used before" in await refusal(inside, rollout, token)
        back = tokens.sign(claims(inside, rollout, answer="withdraw"), SECRET)
        await use(inside, rollout, back)
        assert "used before" in await refusal(inside, rollout, token), "also when its vote was taken back"
        assert "used before" in await refusal(inside, rollout, back)
        await use(inside, rollout, tokens.sign(claims(inside, rollout), SECRET))


async def test_a_token_that_is_used_twice_at_once_counts_once(tmp_path: Path) -> None:
    async with control_environment(tmp_path, service_accounts=services(tmp_path)) as inside:
        rollout = await inside.submit(text=TWO)
        token = tokens.sign(claims(inside, rollout), SECRET)
        told = await asyncio.gather(*(use(inside, rollout, token) for _ in range(3)), return_exceptions=True)
        assert sum(isinstance(each, dict) for each in told) == 1
        assert len(inside.state.index.rollout(rollout).votes) == 1


async def test_what_a_token_is_refused_for(tmp_path: Path) -> None:
    async with control_environment(tmp_path, service_accounts=services(tmp_path)) as inside:
        rollout = await inside.submit()
        other = await inside.submit(text=PLAN.replace("name: sysctl", "name: other"))
        now = inside.clock.now()
        for changed, why in (
            ({"expires": now}, "expired"),
            ({"expires": now + 30 * 86_400}, "more than 7 days"),
            ({"digest": inside.state.index.rollout(other).digest.whole}, "sign a new one"),
            ({"rollout": other}, f"for {other}"),
            ({"service": "slack"}, "'slack': no such service account"),
            ({"team": "search"}, "not a member of search"),
        ):
            token = tokens.sign(claims(inside, rollout, **changed), SECRET)
            assert why in await refusal(inside, rollout, token), why
        good = tokens.sign(claims(inside, rollout), SECRET)
        for token in (
            tokens.sign(claims(inside, rollout), SECRET[::-1]),
            good[:-2] + ("AA" if not good.endswith("AA") else "BB"),
            good.replace("rdt1.", "rdt2."),
            "x",
            f"{good}.x",
        ):
            assert "token" in await refusal(inside, rollout, token)
        await use(inside, rollout, good)


async def test_a_key_that_others_can_read_is_no_key(tmp_path: Path) -> None:
    async with control_environment(tmp_path, service_accounts=services(tmp_path)) as inside:
        rollout = await inside.submit()
        (tmp_path / "jira.key").chmod(0o644)
        with pytest.raises(ApiError) as answer:
            await use(inside, rollout, tokens.sign(claims(inside, rollout), SECRET))
        assert (answer.value.status, answer.value.code) == (409, "key-file")


async def test_the_public_half_of_a_key_is_enough(tmp_path: Path) -> None:
    private = Ed25519PrivateKey.generate()
    async with control_environment(tmp_path, service_accounts=services(tmp_path)) as inside:
        rollout = await inside.submit()
        pem = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / "jira.key").write_bytes(pem)
        unsigned = tokens.sign(claims(inside, rollout), SECRET).rpartition(".")[0]
        forged = tokens.sign(claims(inside, rollout), pem)
        assert "not signed" in await refusal(inside, rollout, forged), "the public key is not an HMAC secret"
        signature = tokens._encode_base64url(private.sign(unsigned.encode()))
        assert (await use(inside, rollout, f"{unsigned}.{signature}"))["state"] == "open"


async def test_four_eyes_are_not_passed_through_a_service(tmp_path: Path) -> None:
    """Not as whom it vouches for, not by carrying its token, not by an alias; nor after a restart."""

    async def sqlite(compiled: Any) -> Any:
        return await open_store(tmp_path / "state", compile_plan=compiled)

    accounts = services(tmp_path)
    async with control_environment(tmp_path, store=sqlite, service_accounts=accounts) as inside:
        rollout = await inside.submit("olga", FOUR_EYES_PLAN)

    async def refused_all(inside: ControlEnvironment) -> None:
        for outside, who in (("olga@example.com", "nora"), ("OLGA", "nora"), ("bob@example.com", "olga")):
            token = tokens.sign(claims(inside, rollout, outside=outside), SECRET)
            assert "four eyes" in await refusal(inside, rollout, token, who)

    async with control_environment(tmp_path, store=sqlite, service_accounts=accounts) as inside:
        await refused_all(inside)
    aliases = services(tmp_path, people={"U012": "olga", "U013": "zoe"})
    async with control_environment(tmp_path, store=sqlite, service_accounts=aliases) as inside:
        token = tokens.sign(claims(inside, rollout, outside="U012"), SECRET)
        assert "four eyes" in await refusal(inside, rollout, token)
        token = tokens.sign(claims(inside, rollout, outside="bob@example.com"), SECRET)
        assert "not listed for service account" in await refusal(inside, rollout, token)
        token = tokens.sign(claims(inside, rollout, outside="U013"), SECRET)
        assert (await use(inside, rollout, token))["state"] == "open"


LOOKALIKES = (
    "olga ",
    " olga",
    "olga.",
    "olga+x@y",
    "@olga",
    "\N{CYRILLIC SMALL LETTER O}lga",
    "olg\N{CYRILLIC SMALL LETTER A}@example.com",
    "#1001",
    "CORP\\olga",
)
"""Names that are not the submitter's, letter for letter, and that a service may mean her by."""


@pytest.mark.parametrize("outside", LOOKALIKES)
async def test_lookalike_of_the_submitter_is_refused(tmp_path: Path, outside: str) -> None:
    async with control_environment(tmp_path, service_accounts=services(tmp_path)) as inside:
        rollout = await inside.submit("olga", FOUR_EYES_PLAN)
        token = tokens.sign(claims(inside, rollout, outside=outside), SECRET)
        with pytest.raises(ApiError) as refused:
            await use(inside, rollout, token)
        assert refused.value.status in (400, 403)
        assert inside.state.index.rollout(rollout).votes == ()


async def test_submitter_without_a_plain_name_needs_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A uid without a name cannot be compared with what a service calls its users."""
    nameless = Account(1001, "#1001", frozenset({"wheel"}))
    monkeypatch.setitem(ACCOUNTS, "olga", nameless)
    async with control_environment(tmp_path, service_accounts=services(tmp_path)) as inside:
        rollout = await inside.submit("olga", FOUR_EYES_PLAN)
        token = tokens.sign(claims(inside, rollout, outside="olga"), SECRET)
        assert "people" in await refusal(inside, rollout, token)


async def test_one_person_is_one_voice_however_they_speak(tmp_path: Path) -> None:
    async with control_environment(tmp_path, service_accounts=services(tmp_path)) as inside:
        rollout = await inside.submit(text=TWO)
        await inside.vote("oscar", rollout, "start")
        token = tokens.sign(claims(inside, rollout, outside="oscar@example.com"), SECRET)
        with pytest.raises(ApiError) as answer:
            await use(inside, rollout, token)
        assert answer.value.code == "already-voted"
        await use(inside, rollout, tokens.sign(claims(inside, rollout), SECRET))
        assert inside.state.index.rollout(rollout).votes[-1].actor.uid == ACCOUNTS["nora"].uid


async def test_a_token_at_proceed_says_what_it_was_shown(tmp_path: Path) -> None:
    async with control_environment(tmp_path, service_accounts=services(tmp_path)) as inside:
        rollout = await inside.start()
        await inside.fail(rollout, "p1")
        with pytest.raises(ApiError) as answer:
            await use(inside, rollout, tokens.sign(claims(inside, rollout, gate="proceed"), SECRET))
        assert answer.value.code == "no-failures-shown"
        shown = claims(inside, rollout, gate="proceed", shown=["p1#1"])
        assert (await use(inside, rollout, tokens.sign(shown, SECRET)))["state"] == "open"


async def test_token_approves_unseen_files_only_by_its_claim(tmp_path: Path) -> None:
    async with control_environment(tmp_path, service_accounts=services(tmp_path)) as inside:
        files = {"site.yml": "- hosts: all\n", "undo.yml": "- hosts: all\n"}
        inside.sources.commit(URL, files | {"group_vars/all": "$ANSIBLE_VAULT;1.1;AES256\n61\n"}, ["main"])
        rollout = await inside.submit(text=TWO)
        with pytest.raises(ApiError) as answer:
            await use(inside, rollout, tokens.sign(claims(inside, rollout), SECRET))
        assert answer.value.code == "unseen"
        accepted = claims(inside, rollout, unseen=True)
        assert (await use(inside, rollout, tokens.sign(accepted, SECRET)))["votes"][0]["yes"]


@given(
    st.text(max_size=200)
    | st.binary(max_size=200).map(lambda raw: f"rdt1.{tokens._encode_base64url(raw)}.AA")
)
def test_no_text_is_a_token_by_accident(text: str) -> None:
    with pytest.raises(tokens.InvalidToken):
        tokens.verify(text, SECRET)
