"""Lists of NetBox by REST, through pynetbox: read whole, counted, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rolloutd.adapters.netbox.http import NetboxSession
from rolloutd.adapters.netbox.objects import kind_fields, read_shape
from rolloutd.ports import JSON

PATHS = {"devices": "/api/dcim/devices/", "virtual_machines": "/api/virtualization/virtual-machines/"}

PAGE_SIZE = 1000
"""Objects of one page: the server's own limit unless its operator changed it."""

MAX_OBJECTS = 500_000
"""Limit of one list, five times the largest fleet: some hundred bytes of memory each."""

READ_TRIES = 2
"""A list that another user changes while it is read is read once more."""


@dataclass(frozen=True, slots=True)
class Page:
    count: int
    records: Sequence[Mapping[str, JSON]]


def list_objects(
    session: NetboxSession, kind: str, filters: Mapping[str, JSON], fields: frozenset[str]
) -> Sequence[Mapping[str, JSON]]:
    """Return all objects that match; raises SourceFailed rather than return a part."""
    # Not `primary_ip`, for which the server needs two queries for each object.
    names = ("id", "name", "primary_ip4", "primary_ip6", *kind_fields(kind, fields))
    return list_all(session, PATHS[kind], {**filters, "fields": ",".join(names)})


def list_all(session: NetboxSession, path: str, params: Mapping[str, JSON]) -> Sequence[Mapping[str, JSON]]:
    """Return all objects of a list; raises SourceFailed if their number is not the server's count."""
    for _ in range(READ_TRIES):
        count, records, is_shifted = _read_pages(session, path, params)
        if len({record["id"] for record in records}) == len(records) == count and not is_shifted:
            return records
    problem = f"{len(records)} of {count} objects came from {path}"
    raise session.error(problem, "the next refresh reads them again")


def read_page(session: NetboxSession, path: str, params: Mapping[str, JSON]) -> Page:
    """Return one page of a list; `params` may have `limit` and `offset`."""
    filters = dict(params)
    limit, offset = filters.pop("limit", PAGE_SIZE), filters.pop("offset", 0)

    def read() -> Page:
        count, found = session.get_page(path, filters, limit, offset)
        records = [dict(record) for record in found]
        if not all(isinstance(record["id"], int) for record in records):
            raise TypeError("an object has no id")
        return Page(int(count), records)

    return read_shape(read, session.source)


def _read_pages(
    session: NetboxSession, path: str, params: Mapping[str, JSON]
) -> tuple[int, list[Mapping[str, JSON]], bool]:
    """Return the last count, the objects, and whether the pages shifted while they were read.

    Pages are read by offset: the server's `next` link may name another host.
    """
    records: list[Mapping[str, JSON]] = []
    known: set[int] = set()
    while True:
        # By id, so that an object that is added meanwhile shifts no page.  If one is removed, the next page
        # skips an object, and one that is added hides that from the count: so pages overlap by one object.
        window = {"limit": PAGE_SIZE, "offset": max(0, len(records) - 1), "ordering": "id"}
        page = read_page(session, path, {**params, **window})
        seen = 1 if records else 0
        if records and [each["id"] for each in page.records[:1]] != [records[-1]["id"]]:
            return page.count, records, True
        new = page.records[seen:]
        # An answer with objects that came before would never end.
        if not known.isdisjoint(record["id"] for record in new):
            return page.count, records, True
        records += new
        known.update(record["id"] for record in new)
        if len(records) > MAX_OBJECTS:
            raise session.error(f"more than {MAX_OBJECTS} objects at {path}", "give the source a filter")
        if len(page.records) <= seen or len(records) >= page.count:
            return page.count, records, False
