"""Result of a run from its job and its events.

A job's status alone proves nothing: it may turn after a restart of AWX, a job is `canceled` while its
playbook goes on, and `successful` if no host matched.  A run is Ok or Failed only by the events of its own
playbook at the pinned commit; everything else is Unknown, and what is left on the node is ended before its
next run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from machines.model.rollout import FailureCode
from rolloutd.adapters.ansible.progress import evaluate_run
from rolloutd.adapters.ansible.run_directory import RunStatus
from rolloutd.adapters.awx.events import EventFold
from rolloutd.adapters.awx.module_wrapper import SECOND_JOB
from rolloutd.ports import JSON, Failed, Ok, Unknown

REAPER_TEXTS = ("marked as failed", "reaped", "shutdown signal")
"""Parts of the explanation of a job that AWX lost sight of: its playbook may go on."""

TIMEOUT_TEXT = "terminated due to timeout"
"""Part of the explanation of a job that its container ended at the time limit."""


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A job that is over, and what the run asked for.

    `is_complete`: AWX has stored all events.  `begins`: how often it began the job.  `is_cancelled`: we
    cancelled it.
    """

    job: Mapping[str, JSON]
    events: EventFold
    facts: Mapping[str, JSON]
    is_complete: bool
    begins: int
    is_cancelled: bool

    @property
    def title(self) -> str:
        return f"job {self.job.get('id')} of {self.events.progress.node}"


def is_lost(job: Mapping[str, JSON]) -> bool:
    """Return whether AWX ended the job without knowing its playbook's end; the status may still turn."""
    explanation = str(job.get("job_explanation") or "")
    return job.get("status") in ("failed", "error") and any(text in explanation for text in REAPER_TEXTS)


def evaluate(run: EndedRun) -> Ok | Failed | Unknown:
    status, explanation = str(run.job.get("status")), str(run.job.get("job_explanation") or "").strip()
    if run.job.get("started") is None and not run.is_cancelled:
        return _never_began(run, status, explanation)
    if (doubt := _doubt(run, status, explanation)) is not None:
        return Unknown(f"{run.title}{doubt}")
    if run.is_cancelled:
        return _evaluate(run, "cancelled", -9)
    if TIMEOUT_TEXT in explanation:
        return _evaluate(run, "limit", -9)
    return _evaluate(run, "exit", 0 if status == "successful" else 2)


def _doubt(run: EndedRun, status: str, explanation: str) -> str | None:
    """Return why the job does not show what the playbook did on the node; None if it does."""
    progress = run.events.progress
    revision, pin = str(run.job.get("scm_revision") or ""), str(run.facts.get("rolloutd_pin"))
    failure = progress.failure_event
    if revision != pin and (revision or progress.task):
        return (
            f" ran commit {revision[:12] or 'unknown'}, not the pinned {pin[:12]}; check the project in AWX"
        )
    if run.begins > 1 or (failure is not None and SECOND_JOB in str(failure.get("text"))):
        return " was begun twice by AWX; the second one was refused on the node"
    if run.is_cancelled or TIMEOUT_TEXT in explanation:
        return None
    if failure is not None and "signal" in failure:
        return (
            f': its task "{failure.get("task")}" was ended by signal {failure["signal"]}, and left no result'
        )
    if status == "canceled":
        return " was cancelled in AWX, and its playbook may have gone on"
    if status == "error" or is_lost(run.job):
        return f": AWX does not know how it ended: {explanation or status}"
    if progress.has_stats:
        has_failed = failure is not None or not progress.finished_tasks
        return (
            ": its status is failed, and its events are not"
            if status == "failed" and not has_failed
            else None
        )
    if status == "failed" and (failure is not None or (run.is_complete and not progress.task)):
        return None
    return f": {run.events.lost} events were lost, and how it ended is not among the others"


def _evaluate(run: EndedRun, ended: str, code: int) -> Ok | Failed:
    status = RunStatus(ended, code, 0.0, 0.0, 0)
    playbook, limit_s = (
        str(run.facts.get("rolloutd_playbook")),
        float(run.facts.get("rolloutd_timeout_s") or 0),
    )
    return evaluate_run(run.events.progress, status, playbook, limit_s, run.events.output)


def _never_began(run: EndedRun, status: str, explanation: str) -> Failed:
    if status == "canceled":
        return Failed(f"{run.title} was cancelled in AWX before it began", code=FailureCode.INTERFERENCE)
    return Failed(
        f"{run.title} was not begun by AWX: {explanation or status}", code=FailureCode.NEVER_STARTED
    )
