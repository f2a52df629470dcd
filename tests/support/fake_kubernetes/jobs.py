"""Jobs as the controller-manager and a kubelet play them, with real processes for containers.

It does what the facts say of backoffLimit 0 and podReplacementPolicy Failed, and misbehaves when it is told
to: a second pod, a lost container, a log whose beginning is gone.
"""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.fake_kubernetes.objects import Change, Objects, format_time

JSON = Any

CHECK_S = 0.05
MAX_MESSAGE_BYTES = 4096


class JobController:
    """Runs the pods of Jobs below `directory`."""

    def __init__(self, objects: Objects, directory: Path) -> None:
        self._objects, self._directory = objects, directory
        self._new: list[JSON] = []
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self.may_start = True
        """False: pods stay Pending, as without a place or an image."""
        self.log_begins_at: dict[str, int] = {}
        """By pod: the line at which its log begins since a rotation."""
        self.is_log_reversed = False
        """True: a log's lines come in the wrong order."""
        objects.listeners.append(self._on_change)

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            for job in self._new:
                self.add_pod(job)
            self._new = []
            # Both once for each pass: hundreds of ended runs must cost little.
            jobs = {each["metadata"]["name"]: each for each in self._objects.all("jobs", "")}
            for pod in list(self._objects.all("pods", "")):
                await self._work_on(pod, jobs.get(_job_of(pod)))
            pods: dict[str, list[JSON]] = {}
            for pod in self._objects.all("pods", ""):
                pods.setdefault(_job_of(pod), []).append(pod)
            for job in list(self._objects.all("jobs", "")):
                self._count(job, pods.get(job["metadata"]["name"], []))

    def _on_change(self, change: Change) -> None:
        if change.resource == "jobs" and change.before is None:
            self._new.append(change.after)

    def add_pod(self, job: JSON) -> JSON:
        """Create a pod of the Job; a second one is what the documentation warns of."""
        metadata, template = job["metadata"], job["spec"]["template"]
        labels = {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": metadata["name"]}
        pod = {
            "metadata": {
                "name": f"{metadata['name']}-{uuid.uuid4().hex[:5]}",
                "namespace": metadata["namespace"],
                "labels": labels,
                "annotations": template["metadata"]["annotations"],
                "ownerReferences": [{"kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}],
            },
            "spec": template["spec"],
            "status": {"phase": "Pending"},
        }
        return self._objects.create("pods", pod)

    def place(self, pod: JSON) -> Path:
        return self._directory / pod["metadata"]["uid"]

    def read_log(self, pod: JSON, query: dict[str, str]) -> str:
        """Return the log of a pod, without what a rotation has taken; `sinceSeconds` repeats too much."""
        path = self.place(pod) / "log"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        lines = lines[self.log_begins_at.get(pod["metadata"]["name"], 0) :]
        return "".join(reversed(lines) if self.is_log_reversed else lines)

    def pods_of(self, name: str) -> list[JSON]:
        return [each for each in self._objects.all("pods", "") if _job_of(each) == name]

    def lose(self, name: str) -> None:
        """End the containers of a Job as the kernel does; no message is left."""
        for pod in self.pods_of(name):
            self._end(pod)

    def end_all(self) -> None:
        for pod in list(self._objects.all("pods", "")):
            self._end(pod)

    def _end(self, pod: JSON) -> None:
        """End all processes of a pod, its first one first: what ends it ends all, so it sees no other end."""
        first = self._processes.get(pod["metadata"]["uid"])
        if first is not None and first.returncode is None:
            first.kill()
        for pid in self._pids(pod):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _work_on(self, pod: JSON, job: JSON | None) -> None:
        uid = pod["metadata"]["uid"]
        process = self._processes.get(uid)
        if "deletionTimestamp" in pod["metadata"] or job is None or "deletionTimestamp" in job["metadata"]:
            if process is None or process.returncode is not None:
                self._objects.remove("pods", pod)
            elif not (self.place(pod) / "stopping").exists():
                (self.place(pod) / "stopping").touch()
                process.send_signal(signal.SIGTERM)
            if process is None or process.returncode is None:
                return
        if process is None:
            await self._start(pod)
        elif process.returncode is not None and pod["status"]["phase"] == "Running":
            self._end(pod)  # the container's end is that of all its processes
            self._finish(pod, process.returncode)

    async def _start(self, pod: JSON) -> None:
        container = pod["spec"]["containers"][0]
        given = next(each["secret"]["secretName"] for each in pod["spec"]["volumes"] if "secret" in each)
        secrets = [each for each in self._objects.all("secrets", "") if each["metadata"]["name"] == given]
        if not secrets or not self.may_start:
            waiting = {"reason": "ContainerCreating" if self.may_start else "ImagePullBackOff"}
            self._set_state(pod, "Pending", {"waiting": waiting})
            return
        place = self.place(pod)
        for name in ("work", "given"):
            (place / name).mkdir(parents=True)
        for name, content in secrets[0]["data"].items():
            (place / "given" / name).write_bytes(base64.b64decode(content))
        environment = {
            "PATH": os.environ["PATH"],
            "ROLLOUTD_POD": pod["metadata"]["uid"],
            "ROLLOUTD_WORK": str(place / "work"),
            "ROLLOUTD_GIVEN": str(place / "given"),
            "ROLLOUTD_MESSAGE": str(place / "message"),
        }
        with (place / "log").open("wb") as output, (place / "errors").open("wb") as errors:
            self._processes[pod["metadata"]["uid"]] = await asyncio.create_subprocess_exec(
                *container["command"], env=environment, stdout=output, stderr=errors, start_new_session=True
            )
        self._set_state(pod, "Running", {"running": {"startedAt": format_time()}})

    def _finish(self, pod: JSON, code: int) -> None:
        path = self.place(pod) / "message"
        message = path.read_text()[:MAX_MESSAGE_BYTES] if path.exists() else ""
        status = 128 - code if code < 0 else code
        ended = {"exitCode": status, "reason": "Error" if status else "Completed", "message": message}
        self._set_state(pod, "Failed" if status else "Succeeded", {"terminated": ended})

    def _set_state(self, pod: JSON, phase: str, state: JSON) -> None:
        wanted = {
            "phase": phase,
            "containerStatuses": [{"name": "run", "state": state, "started": "running" in state}],
        }
        if pod["status"] != wanted:
            self._objects.modify("pods", pod, lambda each: each.update(status=wanted))

    def _count(self, job: JSON, pods: list[JSON]) -> None:
        if "deletionTimestamp" in job["metadata"]:
            if not pods:
                self._objects.remove("jobs", job)
                for kind in ("secrets", "poddisruptionbudgets"):
                    for each in list(self._objects.all(kind, "")):
                        if each["metadata"]["name"] == job["metadata"]["name"]:
                            self._objects.remove(kind, each)
            return
        phases = [each["status"]["phase"] for each in pods]
        finished = "Failed" if "Failed" in phases else "Complete" if "Succeeded" in phases else ""
        if finished and not job.get("status", {}).get("conditions"):
            conditions = [{"type": finished, "status": "True"}]
            self._objects.modify("jobs", job, lambda each: each.update(status={"conditions": conditions}))

    def _pids(self, pod: JSON) -> Iterator[int]:
        """Yield the processes of a pod: all have its directory in their environment."""
        mark = str(self.place(pod)).encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):
                    if mark in (entry / "environ").read_bytes():
                        yield int(entry.name)


def _job_of(pod: JSON) -> str:
    return str(pod["metadata"]["labels"]["batch.kubernetes.io/job-name"])
