"""What everybody may read of a team's own check, and what its members alone see.

Sentences travel: into the status, the audit, mails and failures.  What a team's
hook has said stays in the step's output, which has its readers.
"""

from __future__ import annotations

from rolloutd.ports import Failed, Ok, StepResult


def guarded(result: StepResult, team: str | None) -> StepResult:
    """Return the result with what a team's check has said in its output alone; None is everybody's check."""
    if team is None:
        return result
    match result:
        case Ok():
            return Ok(f"the check of team {team} has passed", output=_kept(result.text, result.output))
        case Failed():
            said = f"the check of team {team} has not passed; its members see what it said"
            return Failed(said, output=_kept(result.text, result.output))
        case _:
            return result


def _kept(text: str, output: str) -> str:
    return "\n".join(part for part in (text, output) if part)
