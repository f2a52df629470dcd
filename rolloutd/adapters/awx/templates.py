"""Job templates of AWX: which one runs a playbook, and whether it takes what a run gives it.

AWX ignores a field of a launch that its template does not ask for, and runs the job without it.  So a
template must ask for each of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from rolloutd.adapters.awx.http import AwxClient, Query
from rolloutd.errors import AdapterFailed
from rolloutd.ports import JSON

ASKED = ("inventory", "variables", "scm_branch", "job_type", "timeout", "diff_mode")
"""What a run gives to its job; the template must have a prompt on launch for each."""

BROKEN = frozenset({"failed", "error", "canceled", "missing", "never updated"})
"""Statuses of a project that has no files to run."""

CACHE_S = 60.0
"""Time after which a template is read again; each launch is compared with its answer all the same."""


class TemplateUnusable(AdapterFailed):
    """No job template can run the playbook; the text says what to do in AWX."""


@dataclass(frozen=True, slots=True)
class Template:
    id: int
    name: str


@dataclass(slots=True)
class Templates:
    """The templates of the projects that the settings name by git URL."""

    client: AwxClient
    organization_name: str
    projects: Mapping[str, str]
    _organization: int | None = None
    _cache: dict[tuple[str, str], tuple[float, Template]] = field(default_factory=dict)

    async def organization(self, *, is_asked_again: bool = False) -> int:
        """Return the id of the organization; raises RunnerUnavailable if the account does not see it."""
        if self._organization is None or is_asked_again:
            listed = await self.client.list_all("organizations/", {"name": self.organization_name})
            exact = [each for each in listed if each.get("name") == self.organization_name]
            if not exact:
                raise self.client.unavailable(
                    f"no organization {self.organization_name} that the account may see",
                    "correct `organization` or add the account to it",
                )
            self._organization = int(exact[0]["id"])
        return self._organization

    def require_source(self, kind: str, url: str) -> str:
        """Return the project of a plan's source; raises TemplateUnusable for a source that AWX cannot run."""
        if kind != "git":
            raise TemplateUnusable(
                f"{self.client.name}: AWX runs playbooks of git only, not uploaded ones; "
                "name `git` and `ref` in the plan's `source`"
            )
        if (name := self.projects.get(url)) is None:
            raise TemplateUnusable(
                f"{self.client.name}: no project for {url}; add it to `projects` in the settings"
            )
        return name

    async def find(self, project_name: str, playbook: str) -> Template:
        """Return the template of a playbook; raises TemplateUnusable."""
        cached = self._cache.get((project_name, playbook))
        if cached is not None and monotonic() - cached[0] < CACHE_S:
            return cached[1]
        project = await self.project(project_name)
        template = await self._find(project, playbook)
        self._cache[project_name, playbook] = (monotonic(), template)
        return template

    async def project(self, name: str) -> Mapping[str, JSON]:
        """Return a project that can run a pinned commit; raises TemplateUnusable."""
        listed = await self.client.list_all("projects/", {"name": name})
        exact = [each for each in listed if each.get("name") == name]
        if len(exact) != 1:
            problem = "is not there or not visible" if not exact else "is there twice"
            raise self._unusable(f"project {name} {problem}", "correct `projects`, or the account's rights")
        project = exact[0]
        if project.get("allow_override") is not True:
            raise self._unusable(f"project {name} does not allow a branch override", "turn it on in AWX")
        if project.get("status") in BROKEN and not project.get("scm_update_on_launch"):
            # AWX refuses each launch until the project is updated; the nodes wait.
            raise self.client.unavailable(f"the last update of project {name} failed", "update it in AWX")
        return project

    def forget(self) -> None:
        """Read the templates again before the next launch."""
        self._cache.clear()

    async def problems(self, project_name: str) -> Sequence[str]:
        """Return a sentence for each template of a project that cannot run playbooks, or for its lack."""
        project = await self.project(project_name)
        templates = await self._startable({"project": int(project["id"])})
        if not templates:
            text = (
                f"{self.client.name}: no job template of project {project_name} that the account may launch"
            )
            return [f"{text}; add one for each playbook"]
        found = [await self._problem(each) for each in templates]
        return [text for text in found if text]

    async def _find(self, project: Mapping[str, JSON], playbook: str) -> Template:
        startable = await self._startable({"project": int(project["id"]), "playbook": playbook})
        where = f"of project {project['name']} for {playbook}"
        if not startable:
            raise self._unusable(
                f"no job template {where} that the account may launch", "add one, or give it `execute`"
            )
        if len(startable) > 1:
            names = ", ".join(str(each.get("name")) for each in startable[:3])
            raise self._unusable(
                f"several job templates {where} ({names})", "let the account launch only one"
            )
        if problem := await self._problem(startable[0]):
            raise TemplateUnusable(problem)
        return Template(int(startable[0]["id"]), str(startable[0].get("name")))

    async def _startable(self, query: Query) -> Sequence[Mapping[str, JSON]]:
        listed = await self.client.list_all("job_templates/", query)
        return [each for each in listed if _may_start(each)]

    async def _problem(self, template: Mapping[str, JSON]) -> str:
        """Return why a template cannot run a playbook of ours, as a sentence; empty if it can."""
        launch = await self.client.get(f"job_templates/{int(template['id'])}/launch/")
        problem = _find_problem(template, launch if isinstance(launch, dict) else {})
        subject = f"{self.client.name}: job template {template.get('name')}"
        return f"{subject} {problem}; change it in AWX" if problem else ""

    def _unusable(self, problem: str, remedy: str) -> TemplateUnusable:
        return TemplateUnusable(f"{self.client.name}: {problem}; {remedy}")


def _may_start(template: Mapping[str, JSON]) -> bool:
    rights = template.get("summary_fields", {}).get("user_capabilities", {})
    # A list for another serializer lacks the field; then the launch says whether it may.
    return bool(rights.get("start", True))


def _find_problem(template: Mapping[str, JSON], launch: Mapping[str, JSON]) -> str:
    missing = [name for name in ASKED if launch.get(f"ask_{name}_on_launch") is not True]
    if missing:
        return f"does not prompt on launch for {', '.join(missing)}"
    if template.get("allow_simultaneous") is not True:
        return "runs one job at a time (concurrent jobs are off)"
    if template.get("job_slice_count", 1) not in (0, 1):
        return "slices its jobs"
    if launch.get("variables_needed_to_start") or launch.get("passwords_needed_to_start"):
        return "needs answers of a survey, or passwords, to start"
    return ""
