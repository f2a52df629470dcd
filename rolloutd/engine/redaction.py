"""Redaction of the output of teams' own checks.

Texts of results go into the status, the audit, mails and failures.  A team's check
output stays in the step's output, which only the team and admins may read.
"""

from __future__ import annotations

from rolloutd.ports import Failed, Ok, StepResult


def redact_for_team(result: StepResult, team: str | None) -> StepResult:
    """Return the result with the text of a team's check moved to its output; no team, no change."""
    if team is None:
        return result
    match result:
        case Ok():
            output = _join_output(result.text, result.output)
            return Ok(f"the check of team {team} has passed", output, result.value)
        case Failed():
            text = f"the check of team {team} has not passed; its members see its output"
            return Failed(text, _join_output(result.text, result.output), result.code)
        case _:
            return result


def _join_output(text: str, output: str) -> str:
    return "\n".join(part for part in (text, output) if part)
