"""What a voter reads: the change and its differences, the checks, and what an approval starts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from machines.model.events import GateOpened
from machines.model.plan import GateName
from machines.states import Phase
from rolloutd.control.client import ApiError
from rolloutd.control.plans.review import format_value, plan_differences
from rolloutd.control.plans.source_review import read_source_review
from tests.rolloutd.control_environment import PLAN, URL, ControlEnvironment, control_environment

SITE = "- hosts: all\n  tasks: []\n"
SITE_YML = {"site.yml": False}


async def read_review(inside: ControlEnvironment, rollout: str, who: str = "olga") -> Any:
    return await inside.request(who, "get", f"/v1/rollouts/{rollout}/review")


def approvals(review: Any, who: str = "your_approval") -> dict[str, Any]:
    return {each["gate"]: each[who] for each in review["gates"]}


async def test_start_gate_reports_blast_radius_up_to_next_gate(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        radii = approvals(await read_review(inside, rollout), "blast_radius")
        teams = ["payments", "search"]
        # The canaries, one of each team, one after the other: then the gate `continue` waits.
        assert (radii["start"]["nodes"], radii["start"]["at_once"]) == (2, 1)
        assert radii["start"]["teams"] == radii["continue"]["teams"] == teams
        assert radii["start"]["work"] is None, "there is no forecast yet"
        assert not radii["start"]["traffic_probed"]
        assert (radii["continue"]["nodes"], radii["proceed"]["nodes"]) == (2, 0)


async def test_pools_limit_nodes_at_once(tmp_path: Path) -> None:
    pools = {"team": {"max_unavailable": 2}, "zone": {"max_unavailable": 1}}
    async with control_environment(tmp_path, pools={"team": {"max_unavailable": 1}}) as inside:
        radius = approvals(await read_review(inside, await inside.submit()), "blast_radius")["continue"]
        assert (radius["nodes"], radius["at_once"]) == (2, 2)
    # No node has a zone, so all are in one pool of that key.
    async with control_environment(tmp_path / "second", pools=pools) as inside:
        radius = approvals(await read_review(inside, await inside.submit()), "blast_radius")["continue"]
        assert radius["at_once"] == 1


async def test_approval_names_the_missing_votes_it_gives(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        start = approvals(await read_review(inside, rollout))["start"]
        assert start == {"owner": True, "teams": [], "opens": True, "refused": None}
        refused = approvals(await read_review(inside, rollout, "paul"))["start"]["refused"]
        assert refused == f"paul may not vote at start of {rollout}; ask a member of infra"
        await inside.vote("olga", rollout, "start")
        await inside.commit(GateOpened(rollout, GateName.START, "", inside.clock.now()))
        for node in ("p1", "s1"):
            await inside.finish(rollout, node)
        inside.clock.advance(601)
        inside.observe_all_up()
        paul = approvals(await read_review(inside, rollout, "paul"))
        assert paul["continue"] == {"owner": False, "teams": ["payments"], "opens": False, "refused": None}
        assert "start" not in paul
        await inside.vote("paul", rollout, "continue")
        again = approvals(await read_review(inside, rollout, "paul"))["continue"]
        refused = f"continue of {rollout}: you voted already, yes for payments; no vote is needed"
        assert again["refused"] == refused


async def test_plan_is_shown_without_defaults(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        review = await read_review(inside, await inside.submit())
        values = {each["path"]: each["value"] for each in review["plan"]}
        assert values["soak"] == "10m"
        assert values["maintain[0].playbook"] == "site.yml"
        assert not {path for path in values if "timeout" in path or "windows" in path or "name" in path} - {
            "metadata.name"
        }
        assert review["checks"] == ["reachable"]
        assert (review["previous"], review["plan_differences"]) == (None, [])


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("soak", 3_600.0, "1h"),
        ("maintain[0].timeout", 5_405, "1h30m5s"),
        ("limits.isolate", 900, "15m"),
        ("limits.start", 1_800, "30m"),
        ("guard.after", 120, "2m"),
        ("maintain[0].vars.timeout", 65_535, "65535"),
        ("verify[0].reachable.within", 0, "0s"),
        ("gates.start.four_eyes", False, "false"),
    ],
)
def test_plan_value_reads_as_in_its_file(path: str, value: object, text: str) -> None:
    assert format_value(path, value) == text


async def test_second_submit_shows_differences_to_the_rollout_before(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        first = await inside.start()
        await inside.finish(first, "p1")
        await inside.request("olga", "post", f"/v1/rollouts/{first}/cancel", {"reason": "again"})
        files = {"site.yml": SITE, "undo.yml": "- hosts: all\n", "roles/new.yml": "x: 1\n"}
        inside.sources.commit(URL, files, ["main"])
        inside.clock.advance(5)
        second = await inside.submit(text=PLAN.replace("soak: 10m", "soak: 20m"))
        review = await read_review(inside, second)
        assert review["previous"] == first
        source, soak = review["plan_differences"]
        assert source["path"] == "source"
        assert source["before"] != source["after"]
        assert soak == {"path": "soak", "before": "10m", "after": "20m"}
        assert {each["path"]: each["text"] for each in review["playbooks"]} == {
            "site.yml": SITE,
            "undo.yml": "- hosts: all\n",
        }
        changed = {each["path"]: (each["change"], each["diff"]) for each in review["file_differences"]}
        assert changed["site.yml"] == ("changed", "@@ -1 +1,2 @@\n - hosts: all\n+  tasks: []")
        assert changed["roles/new.yml"] == ("added", "@@ -0,0 +1 @@\n+x: 1")
        assert "undo.yml" not in changed


async def test_command_of_a_build_with_a_template_shows_every_file(tmp_path: Path) -> None:
    """A build runs on the daemon's machine, where the files of the source are."""
    run = "- hosts: all\n  tasks:\n  - command: sh {{ d }}{{ e }}/evil\n"
    plan = PLAN.replace("  maintain:", "  prepare: [{build: {playbook: build.yml}}]\n  maintain:")
    async with control_environment(tmp_path) as inside:
        files = {"site.yml": SITE, "undo.yml": SITE, "build.yml": run, "evil": "exit 1\n"}
        inside.sources.commit(URL, files, ["main"])
        review = await read_review(inside, await inside.submit(text=plan))
        assert [each["path"] for each in review["files"]] == ["evil"]


def test_long_and_many_plan_differences_are_limited() -> None:
    long = {"spec": {"a": "x" * 5000, **{f"k{number}": "y" * 1999 for number in range(300)}}}
    found = plan_differences({"spec": {"a": "x" * 5001}}, long, b"key", ())
    first, last = found[0], found[-1]
    assert str(first["before"]).startswith("x" * 2000 + "\u2026 (3,001 more characters")
    assert first["before"] != first["after"]
    assert last == {
        "path": f"{301 - (len(found) - 1)} further differences",
        "before": None,
        "after": "not shown: more than 200,000 characters",
    }
    assert sum(len(each["after"] or "") for each in found) < 200_000


async def test_playbook_is_withheld_from_users_in_no_team(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        review = await read_review(inside, await inside.submit(), "nora")
        assert [each["text"] for each in review["playbooks"]] == [None, None]
        assert "only members of a team" in review["playbooks"][0]["note"]
        assert review["file_differences"] == []


async def test_link_of_tree_stored_before_upgrade_is_not_read(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        secret = tmp_path / "secret"
        secret.write_text("hidden")
        rollout = await inside.submit()
        tree = next((tmp_path / "trees").iterdir())
        (tree / "site.yml").unlink()
        (tree / "site.yml").symlink_to(secret)
        texts = (await read_review(inside, rollout))["playbooks"]
        assert texts[0]["text"] is None
        assert "hidden" not in str(texts)


ALL_KINDS = (
    PLAN.replace("name: sysctl", "name: kinds")
    .replace('{command: {do: "true", undo: "true"}}', "{playbook: {file: out.yml, undo: in.yml}}")
    .replace("verify: [{reachable: {}}]", "verify: [{playbook: {file: check.yml}}, {ssh: {run: uname -r}}]")
)
FILES = {
    "site.yml": "- hosts: all\n  roles: [base]\n",
    "undo.yml": "- hosts: all\n",
    "out.yml": "- hosts: all\n  tasks: [{include_tasks: drain.yml}]\n",
    "drain.yml": "- raw: drain\n",
    "in.yml": "- hosts: all\n",
    "check.yml": "- hosts: all\n",
    "team.yml": "- hosts: all\n",
    "roles/base/tasks/main.yml": "- raw: 'true'\n",
    "unrelated.yml": "nobody: runs this\n",
}
TEAMS = {
    "infra": {"members": ["olga", "oscar"]},
    "payments": {
        "members": ["paul"],
        "verify": [{"playbook": {"file": "team.yml"}}, {"ssh": {"run": "systemctl is-active pay"}}],
    },
    "search": {"members": ["@searchers"], "verify": [{"ssh": {"run": "true"}}]},
}


async def test_review_shows_all_that_runs_of_infra_and_teams(tmp_path: Path) -> None:
    async with control_environment(tmp_path, teams=TEAMS) as inside:
        inside.sources.commit(URL, FILES, ["main"])
        review = await read_review(inside, await inside.submit(text=ALL_KINDS))
        named = {each["path"]: each["text"] for each in review["playbooks"]}
        run = ("out.yml", "in.yml", "site.yml", "undo.yml", "check.yml", "team.yml")
        assert named == {path: FILES[path] for path in run}
        imported = {each["path"]: each["text"] for each in review["files"]}
        assert imported == {path: FILES[path] for path in ("drain.yml", "roles/base/tasks/main.yml")}
        commands = {each["path"]: each["text"] for each in review["commands"]}
        assert commands["verify[1].ssh.run"] == "uname -r"
        assert "systemctl is-active pay" in commands.values()
        assert review["unseen"] == []


async def test_differences_have_each_file_and_link(tmp_path: Path) -> None:
    many = {f"files/{number:04}.txt": "same\n" for number in range(2_500)}
    async with control_environment(tmp_path) as inside:
        inside.sources.commit(URL, FILES | many, ["main"])
        first = await inside.start()
        await inside.finish(first, "p1")
        await inside.request("olga", "post", f"/v1/rollouts/{first}/cancel", {"reason": "again"})
        inside.clock.advance(5)
        inside.sources.commit(URL, FILES | many | {"files/zzz.txt": "new\n"}, ["main"])
        second = await inside.submit(text=PLAN.replace("soak: 10m", "soak: 20m"))
        before, after = sorted(
            (tmp_path / "trees").iterdir(), key=lambda each: (each / "files/zzz.txt").exists()
        )
        (before / "link").symlink_to("site.yml")
        (after / "link").symlink_to("undo.yml")
        differences = (await read_review(inside, second))["file_differences"]
        assert {each["path"]: (each["change"], each["diff"]) for each in differences} == {
            "files/zzz.txt": ("added", "@@ -0,0 +1 @@\n+new"),
            "link": ("changed", "@@ -1 +1 @@\n-link to site.yml\n+link to undo.yml"),
        }


async def test_vote_on_cut_review_needs_unseen(tmp_path: Path) -> None:
    secret = "$ANSIBLE_VAULT;1.1;AES256\n6162\n"
    async with control_environment(tmp_path) as inside:
        inside.sources.commit(URL, FILES | {"group_vars/all.yml": secret}, ["main"])
        rollout = await inside.submit()
        (unseen,) = (await read_review(inside, rollout))["unseen"]
        assert unseen.startswith("group_vars/all.yml: not shown: encrypted (31 bytes, sha256 ")
        with pytest.raises(ApiError) as refused:
            await inside.vote("olga", rollout, "start")
        assert (refused.value.status, refused.value.code) == (409, "unseen")
        assert "group_vars/all.yml" in str(refused.value)
        assert (await inside.vote("olga", rollout, "start", unseen=True))["votes"][0]["yes"]
        # The next rollout has the same encrypted file: its voters approved it with the first one.
        await inside.commit(GateOpened(rollout, GateName.START, "", inside.clock.now()))
        await inside.finish(rollout, "p1")
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "again"})
        inside.clock.advance(5)
        second = await inside.submit(text=PLAN.replace("soak: 10m", "soak: 20m"))
        review = await read_review(inside, second)
        assert (review["previous"], review["unseen"]) == (rollout, [])
        await inside.vote("olga", second, "start")


async def test_file_of_team_check_is_new_in_each_rollout(tmp_path: Path) -> None:
    """The settings may name the check since yesterday, and the file was in the source before."""
    files = FILES | {"team.yml": "$ANSIBLE_VAULT;1.1;AES256\n6162\n"}
    async with control_environment(tmp_path, teams=TEAMS) as inside:
        inside.sources.commit(URL, files, ["main"])
        rollout = await inside.submit()
        await inside.vote("olga", rollout, "start", unseen=True)
        await inside.commit(GateOpened(rollout, GateName.START, "", inside.clock.now()))
        await inside.finish(rollout, "p1")
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "again"})
        inside.clock.advance(5)
        second = await inside.submit(text=PLAN.replace("soak: 10m", "soak: 20m"))
        (unseen,) = (await read_review(inside, second))["unseen"]
        assert unseen.startswith("team.yml: not shown: encrypted")


SECRETS = {"group_vars/all.yml": "$ANSIBLE_VAULT;1.1;AES256\n6162\n"}


async def test_vote_stays_with_the_rollout_whose_review_was_read(tmp_path: Path) -> None:
    """Its name, the plan's, means another rollout before the review has been read."""
    async with control_environment(tmp_path) as inside:
        first = await inside.submit()
        inside.sources.find_was_called.clear()
        inside.sources.find_may_return.clear()
        voting = asyncio.create_task(inside.vote("olga", "sysctl", "start"))
        await inside.sources.find_was_called.wait()
        await inside.request("olga", "post", f"/v1/rollouts/{first}/cancel", {"reason": "again"})
        inside.sources.commit(URL, FILES | SECRETS, ["main"])
        inside.clock.advance(5)
        second = await inside.submit()
        inside.sources.find_may_return.set()
        with pytest.raises(ApiError) as refused:
            await voting
        assert refused.value.code == "closed"
        assert first in str(refused.value)
        assert inside.state.index.rollout(second).votes == ()


async def test_rollout_that_nobody_approved_is_not_the_previous_one(tmp_path: Path) -> None:
    """Its nodes count as changed before any vote, because it supersedes a rollout with the same change."""
    async with control_environment(tmp_path) as inside:
        first = await inside.start()
        await inside.finish(first, "p1")
        inside.clock.advance(5)
        second = await inside.submit(text=PLAN.replace("soak: 10m", "soak: 0s"), supersede=True)
        assert inside.phase(second, "p1") is Phase.DONE
        inside.clock.advance(5)
        third = await inside.submit(text=PLAN.replace("soak: 10m", "soak: 20m"), supersede=True)
        assert (await read_review(inside, third))["previous"] == first


async def test_rollout_of_another_owner_is_not_the_previous_one(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        inside.sources.commit(URL, FILES | SECRETS, ["main"])
        rollout = await inside.submit(who="paul", text=PLAN.replace("owner: infra", "owner: payments"))
        await inside.vote("paul", rollout, "start", unseen=True)
        await inside.commit(GateOpened(rollout, GateName.START, "", inside.clock.now()))
        await inside.finish(rollout, "p1")
        await inside.request("paul", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "again"})
        inside.clock.advance(5)
        review = await read_review(inside, await inside.submit())
        assert review["previous"] is None
        assert review["unseen"][0].startswith("group_vars/all.yml: not shown: encrypted")


async def test_text_over_the_limit_is_not_cut_silently(tmp_path: Path) -> None:
    long = "- hosts: all\n" + "# a comment\n" * 20_000
    async with control_environment(tmp_path) as inside:
        inside.sources.commit(URL, FILES | {"site.yml": long}, ["main"])
        review = await read_review(inside, await inside.submit())
        (shown,) = [each for each in review["playbooks"] if each["path"] == "site.yml"]
        assert shown["text"] is None
        assert shown["note"].startswith("not shown: longer than 200,000 characters (240,013 bytes")
        assert review["unseen"] == [f"site.yml: {shown['note']}"]


def write_tree(directory: Path, binary: bytes, link: str) -> Path:
    """Write a source whose role is a link to one of two directories, each with a binary file."""
    for version in ("v1", "v2"):
        (directory / "common" / version / "files").mkdir(parents=True)
        (directory / "common" / version / "files" / "blob").write_bytes(binary + version.encode())
    (directory / "roles").mkdir()
    (directory / "roles" / "base").symlink_to(f"../common/{link}")
    (directory / "site.yml").write_text("- hosts: all\n  roles: [base]\n")
    return directory


@pytest.mark.parametrize(
    ("binary", "link", "is_unseen"),
    [(b"\xff\x00", "v1", False), (b"\xff\x01", "v1", True), (b"\xff\x00", "v2", True)],
)
def test_bytes_behind_link_are_compared(tmp_path: Path, binary: bytes, link: str, is_unseen: bool) -> None:
    previous = write_tree(tmp_path / "before", b"\xff\x00", "v1")
    review = read_source_review(write_tree(tmp_path / "after", binary, link), SITE_YML, previous, SITE_YML)
    assert [each.partition(":")[0] for each in review.unseen] == ["roles/base/files/blob"] * is_unseen


def test_bytes_that_no_playbook_ran_before_are_new(tmp_path: Path) -> None:
    previous, tree = (write_tree(tmp_path / each, b"\xff\x00", "v1") for each in ("before", "after"))
    (previous / "site.yml").write_text(SITE)
    (unseen,) = read_source_review(tree, SITE_YML, previous, SITE_YML).unseen
    assert unseen.startswith("roles/base/files/blob: not shown: not text")


def test_program_of_ascii_bytes_is_not_shown_as_text(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", b"MZ\0\0", "v1")
    (unseen,) = read_source_review(tree, SITE_YML, None, {}).unseen
    assert unseen.startswith("roles/base/files/blob: not shown: not text (6 bytes, sha256 ")


def test_playbook_named_by_template_shows_whole_source(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", b"text", "v1")
    review = read_source_review(
        tree, dict.fromkeys(["{{ node.labels.os }}.yml", "missing.yml"], False), None, {}
    )
    notes = [each["note"] for each in review.playbooks]
    assert notes == [
        "not shown: its name depends on the node, so all files of the source are below",
        "not shown: no such file in the source",
    ]
    shown = {each["path"] for each in review.files}
    assert {"site.yml", "common/v1/files/blob", "common/v2/files/blob"} <= shown
    assert review.unseen == []


def test_required_collections_are_named_as_unseen(tmp_path: Path) -> None:
    tree, same = (write_tree(tmp_path / each, b"text", "v1") for each in ("tree", "same"))
    for each in (tree, same):
        (each / "collections").mkdir()
        (each / "collections" / "requirements.yml").write_text("collections: [ansible.posix]\n")
    review = read_source_review(tree, SITE_YML, None, {})
    assert review.unseen == ["collections/requirements.yml: ansible-galaxy installs what it names"]
    assert "collections/requirements.yml" in {each["path"] for each in review.files}
    assert read_source_review(tree, SITE_YML, same, SITE_YML).unseen == []
    # The same file may install something else: a range of versions, a tag that moved.
    assert read_source_review(tree, SITE_YML, same, SITE_YML, "a1b2").unseen == [
        "collections/requirements.yml: ansible-galaxy installs what it names; sha256 a1b2"
    ]
