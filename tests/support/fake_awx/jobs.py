"""Jobs of the fake AWX from their launch to their end, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from tests.support.fake_awx.objects import Job, instant
from tests.support.fake_awx.processes import Credential, PlaybookProcess, PlaybookProcesses

JSON = Any

REAPED = "Task was marked as running but was not present in the job queue, so it has been marked as failed."


class Jobs:
    """All jobs, and the processes of those that run."""

    def __init__(self, credential: Credential) -> None:
        self.by_id: dict[int, Job] = {}
        self.credential = credential
        self.capacity = 100
        self.is_paused = False
        """Whether jobs stay pending."""
        self.other_revision = ""
        """The revision that jobs check out whatever was asked for."""
        self.shuffle: random.Random | None = None
        """Stores events out of order and late, by this."""
        self.is_lost: Callable[[Job, JSON], bool] = lambda job, event: False
        """Which events are never stored."""
        self.processes: dict[int, PlaybookProcess] = {}
        self._forks = PlaybookProcesses(credential)
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, job: Job) -> None:
        self.by_id[job.id] = job
        self.schedule()

    def schedule(self) -> None:
        """Start what may start, as AWX's task manager does."""
        for job in self.by_id.values():
            active = [each for each in self.by_id.values() if each.status in ("waiting", "running")]
            is_blocked = not job.template.allow_simultaneous and any(
                each.template is job.template for each in active
            )
            if (
                job.status == "pending"
                and not self.is_paused
                and len(active) < self.capacity
                and not is_blocked
            ):
                job.status = "waiting"
                task = asyncio.get_running_loop().create_task(self._run(job))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def cancel(self, job: Job) -> None:
        job.is_canceled = True
        if process := self.processes.get(job.id):
            process.kill()  # what it started on the node goes on
        self.end(job, "canceled", "")

    def reap(self, job: Job) -> None:
        """Mark a job as failed whose playbook goes on."""
        self.end(job, "failed", REAPED)

    def requeue(self, job: Job) -> None:
        """Put a running job back, whose playbook goes on; it begins again under its id."""
        job.status = "pending"
        self.schedule()

    async def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._forks.close()

    def end(self, job: Job, status: str, explanation: str) -> None:
        job.status, job.explanation, job.finished = status, explanation, instant(time.time())
        self.schedule()

    def begin(self, job: Job, revision: str) -> None:
        """Let a job run without a process: the test emits its events and ends it."""
        job.status, job.started, job.scm_revision = "running", instant(time.time()), revision

    def emit_playbook(self, job: Job, *events: str, **data: JSON) -> None:
        """Emit events of one task on the job's host, in order."""
        for name in events:
            fields = {"task": "work", "play": "all", "host": "n0", "res": {}, **data}
            counts = {"processed": {"n0": 1}, "ok": {"n0": 1}}
            fields |= counts if name == "playbook_on_stats" else {}
            self.emit(job, {"event": name, "event_data": fields, "created": time.time()})

    async def _run(self, job: Job) -> None:
        project = job.template.project
        job.status, job.started = "running", job.started or instant(time.time())
        job.begins, job.counter = job.begins + 1, 0
        wanted = job.fields["scm_branch"] or project.scm_revision
        try:
            tree = project.checkout(wanted)
        except KeyError:
            self.end(job, "error", f"Failed to checkout {wanted}")
            return
        job.scm_revision = self.other_revision or wanted
        if job.inventory is None:
            self.end(job, "error", "Job could not start because it does not have a valid inventory.")
            return
        script = job.inventory.script()
        forks, playbook = self._forks, job.template.playbook
        process = await forks.start(job.id, job.begins, tree, script, job.fields, playbook)
        if job.is_canceled:
            process.kill()
        self.processes[job.id] = process
        loop, is_late = asyncio.get_running_loop(), False
        limit_s = job.fields["timeout"]

        def end_late() -> None:
            nonlocal is_late
            is_late = True
            process.kill()

        timer = loop.call_later(limit_s, end_late) if limit_s > 0 else None
        code = await process.follow(lambda event: self.emit(job, event))
        if timer is not None:
            timer.cancel()
        if not any(each["event"] == "playbook_on_stats" for each in (*job.events, *job.unsaved)):
            for line in process.output().splitlines():
                self.emit(job, {"event": "verbose", "stdout": line, "event_data": {}, "created": time.time()})
        self._save(job, everything=True)
        if job.is_canceled:
            return
        if is_late:
            self.end(job, "failed", "Job terminated due to timeout")
        elif code < 0:
            self.end(job, "error", "")
        else:  # whatever the status is now, as a job that was reaped may turn
            self.end(job, "successful" if code == 0 else "failed", "")

    def emit(self, job: Job, event: JSON) -> None:
        job.emitted += 1
        job.counter += 1  # a job that begins again counts from 1 again
        record = {
            "changed": False,
            "failed": False,
            **event,
            "id": job.id * 100_000 + job.emitted,
            "counter": job.counter,
            "start_line": job.emitted,
            "stdout": event.get("stdout") or f"{event['event']} {event['event_data'].get('task', '')}",
            "created": instant(event["created"]),
        }
        if self.is_lost(job, record):
            return
        job.unsaved.append(record)
        self._save(job, everything=False)

    def _save(self, job: Job, *, everything: bool) -> None:
        """Store events as AWX's receivers do: in batches that overtake each other."""
        if self.shuffle is not None:
            self.shuffle.shuffle(job.unsaved)
        left = 0 if everything or self.shuffle is None else len(job.unsaved) // 2
        job.events += job.unsaved[left:]
        del job.unsaved[left:]
