"""Shell commands of a plan: quotes that are never closed are mistakes, other syntax is the node's."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from rolloutd.plugin.field_types import Command
from tests.rolloutd.planfile.plan_samples import DESIGN_PLAN, diagnostics_of

PLAYBOOK = "    - playbook: {file: isolate.yml, undo: deisolate.yml}\n"
RUN = '"sysctl -n net.core.somaxconn"'


@pytest.mark.parametrize(
    ("old", "new", "path", "quote"),
    [
        (
            PLAYBOOK,
            '    - command: {do: "a \'b", undo: b, look: c}\n',
            "isolate[0].command.do",
            "'",
        ),
        (
            PLAYBOOK,
            "    - command: {do: a, undo: 'b \"lb', look: c}\n",
            "isolate[0].command.undo",
            '"',
        ),
        (RUN, '"echo \'a"', "verify[1].ssh.run", "'"),
        (RUN, '"echo $(date"', "verify[1].ssh.run", "$("),
        (RUN, "'echo \"${HOME}'", "verify[1].ssh.run", '"'),
    ],
)
def test_open_quote_of_command_is_a_mistake(old: str, new: str, path: str, quote: str) -> None:
    (mistake,) = diagnostics_of(DESIGN_PLAN.replace(old, new))
    assert (mistake.path, mistake.message) == (f"spec.{path}", f"{quote} is never closed")
    assert "closes each quote" in mistake.allowed


@pytest.mark.parametrize(
    "command",
    [
        "sed -i 's/\"//' \"/etc/it's\"",
        "echo it\\'s # it's a comment\ntrue",
        "echo a#'b c'",
        "echo \"$(grep -c 'it is' \"$f\")\" `date '+%s'`",
        'test "$(cat /a)" = \'{{ node.labels.rack | default("it\'s") }}\'',
        "echo $'it\\'s' \"cost $\" '\\'",
        "x=$(case a in a) echo 'b';; esac); (( $# > 1 )) && echo $((16#ff))",
        "cat <<E\nit's\nE\n",
        """v="${v%"'"}" """,
        'echo "`date #it\'s`"',
        'echo "`echo \\"it\'s\\"`"',
        """x="$(case $a in a) echo 'say "';; esac)" """,
        "echo $'a\\'",
        'test "$(uname -r)" = \'6.1\' && (systemctl is-active "web")',
    ],
)
def test_closed_quotes_of_command_are_accepted(command: str) -> None:
    assert TypeAdapter(Command).validate_python(command) == command
