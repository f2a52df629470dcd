"""Requests of the AWX runner, with the role that each needs.

The documents show this table, and the tests compare it with the requests that a server has seen.
"""

from __future__ import annotations

from collections.abc import Mapping

EXECUTE = "`execute` on the job templates"
INVENTORY_ADMIN = "`inventory admin` of the organization"
READ_PROJECT = "`read` on the projects"
ANYBODY = "none"
MEMBER = "member of the organization"

REQUESTS: Mapping[tuple[str, str], str] = {
    ("GET", "ping/"): ANYBODY,
    ("GET", "organizations/"): MEMBER,
    ("GET", "projects/"): READ_PROJECT,
    ("GET", "job_templates/"): EXECUTE,
    ("GET", "job_templates/N/launch/"): EXECUTE,
    ("POST", "job_templates/N/launch/"): EXECUTE,
    ("GET", "inventories/"): INVENTORY_ADMIN,
    ("POST", "inventories/"): INVENTORY_ADMIN,
    ("DELETE", "inventories/N/"): INVENTORY_ADMIN,
    ("GET", "inventories/N/hosts/"): INVENTORY_ADMIN,
    ("POST", "inventories/N/hosts/"): INVENTORY_ADMIN,
    ("PATCH", "hosts/N/"): INVENTORY_ADMIN,
    ("POST", "inventories/N/groups/"): INVENTORY_ADMIN,
    ("POST", "groups/N/hosts/"): INVENTORY_ADMIN,
    ("GET", "jobs/"): EXECUTE,
    ("GET", "jobs/N/"): EXECUTE,
    ("GET", "jobs/N/job_events/"): EXECUTE,
    ("POST", "jobs/N/cancel/"): EXECUTE,
}
"""Role by method and path below the prefix; N is an id.  A job's creator may cancel it."""
