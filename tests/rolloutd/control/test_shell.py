"""Shells on nodes: who gets the command, and the audit entry before they have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolloutd.control.client import ApiError
from rolloutd.texts.event_text import describe_entry
from tests.rolloutd.control_environment import control_environment

PATH = "/v1/nodes/p1/shell"


async def test_shell_has_an_audit_entry_of_its_caller(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        answer = await inside.request("paul", "get", PATH)
        assert answer == {"node": "p1", "command": ["ssh", "--", "p1"]}
        before = (await inside.request("nora", "get", "/v1/audit?kind=ShellOpened"))["entries"]
        assert await inside.request("paul", "post", PATH, {"reason": "disk is full"}) == answer
        entries = (await inside.request("nora", "get", "/v1/audit?kind=ShellOpened"))["entries"]
        assert (before, len(entries)) == ([], 1)
        entry = entries[0]["entry"]
        assert (entry["node"], entry["actor"]["name"]) == ("p1", "paul")
        assert describe_entry(entry) == "p1: opened a shell: ssh -- p1: disk is full"


@pytest.mark.parametrize("who", ["nora", "ida", "sara"])
async def test_shell_is_refused_to_others_than_its_team(tmp_path: Path, who: str) -> None:
    async with control_environment(tmp_path) as inside:
        for method, body in (("get", ()), ("post", ({"reason": "curious"},))):
            with pytest.raises(ApiError) as refused:
                await inside.request(who, method, PATH, *body)
            assert refused.value.status == 403
        assert not (await inside.request("nora", "get", "/v1/audit?kind=ShellOpened"))["entries"]


async def test_shell_by_an_invalid_route_is_a_clear_error(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        inside.state.connections.change({"p1": {"ansible_host": "{{ address }}"}})
        with pytest.raises(ApiError, match="p1: ansible_host is a template") as refused:
            await inside.request("paul", "get", PATH)
        assert (refused.value.status, refused.value.code) == (409, "no-route")
        with pytest.raises(ApiError, match="nosuch: no such node"):
            await inside.request("paul", "get", "/v1/nodes/nosuch/shell")
