"""One refresh: check the token and the names, then read by GraphQL or REST.  It blocks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from rolloutd.adapters.netbox import custom_fields, graphql, rest
from rolloutd.adapters.netbox.http import HttpStatus, NetboxSession
from rolloutd.adapters.netbox.objects import (
    OBJECT_TYPES,
    Mapper,
    NetboxObject,
    from_graphql,
    from_rest,
    read_shape,
)
from rolloutd.errors import SourceFailed
from rolloutd.ports import JSON

log = logging.getLogger("rolloutd.adapters.netbox")

SAMPLE_SIZE = 10
"""Objects that are read by both ways: a right that GraphQL lacks shows on most objects."""

NOT_FOUND = 404

ObjectKey = tuple[str, int]


class Reader:
    def __init__(
        self,
        session: NetboxSession,
        kinds: Sequence[str],
        filters: Mapping[str, JSON],
        mapper: Mapper,
        reads_graphql: bool,
    ) -> None:
        self._session = session
        self._kinds = kinds
        self._filters = {name: _query_value(value) for name, value in filters.items()}
        self._mapper = mapper
        self._reads_graphql = reads_graphql
        self._object_fields: frozenset[str] = frozenset()

    def check(self) -> None:
        """Raise SourceFailed unless the token is valid and the server knows the custom fields."""
        try:
            self._session.get("/api/authentication-check/")
        except HttpStatus as error:
            if error.status != NOT_FOUND:
                raise
            self._session.get("/api/status/")  # before NetBox 4.5
        if not custom_fields.needs_check(self._filters, self._mapper.paths):
            return
        known = custom_fields.read_custom_fields(self._session)
        custom_fields.check_filters(self._session, self._kinds, self._filters, known)
        custom_fields.check_paths(self._session, self._kinds, self._mapper.paths, known)
        self._object_fields = frozenset(
            name for name, field in known.items() if field.type in ("object", "multiobject")
        )

    def read_all(self) -> dict[ObjectKey, NetboxObject]:
        """Return all objects; raises SourceFailed, also if there is none."""
        found = [each for kind in self._kinds for each in self._read_kind(kind)]
        if not found:
            raise self._session.error("no object matches", "check `filter` and the token's rights")
        return {(each.kind, each.id): each for each in found}

    def read_some(self, keys: Iterable[ObjectKey]) -> dict[ObjectKey, NetboxObject]:
        """Return those of the objects that match."""
        found: dict[ObjectKey, NetboxObject] = {}
        for kind in self._kinds:
            ids = sorted(number for of_kind, number in keys if of_kind == kind)
            if ids:
                records = rest.list_objects(
                    self._session, kind, {**self._filters, "id": ids}, self._mapper.fields
                )
                found |= {(kind, each.id): each for each in self._from_rest(kind, records)}
        return found

    def _read_kind(self, kind: str) -> Sequence[NetboxObject]:
        # REST refuses an unknown value and a missing right, and counts: GraphQL does none of these.
        fields = self._mapper.fields
        sample = rest.read_page(
            self._session,
            rest.PATHS[kind],
            {
                **self._filters,
                "fields": rest.rest_fields(kind, fields),
                "limit": SAMPLE_SIZE,
                "offset": 0,
                "ordering": "id",
            },
        )
        if len(sample.records) < min(SAMPLE_SIZE, sample.count):
            raise rest.incomplete_list(self._session, rest.PATHS[kind], len(sample.records), sample.count)
        if sample.count == len(sample.records):
            return self._from_rest(kind, sample.records)
        if self._reads_graphql and graphql.can_list(self._filters, fields):
            try:
                return self._read_graphql(kind, sample)
            except SourceFailed as reason:  # REST has the last word, also about a server that is down
                log.info("%s: %s are read by REST: %s", self._session.source, kind, reason)
        return self._from_rest(kind, rest.list_objects(self._session, kind, self._filters, fields))

    def _read_graphql(self, kind: str, sample: rest.Page) -> Sequence[NetboxObject]:
        records = graphql.list_objects(self._session, kind, self._filters, self._mapper.fields, sample.count)
        found = read_shape(lambda: [from_graphql(kind, record) for record in records], self._session.source)
        by_id = {each.id: each for each in found}
        for expected in self._from_rest(kind, sample.records):
            same = by_id.get(expected.id)
            if same is None or self._mapper.to_node(same) != self._mapper.to_node(expected):
                problem = f"GraphQL shows {OBJECT_TYPES[kind]} {expected.id} otherwise"
                raise self._session.error(problem, "read REST")
        return found

    def _from_rest(self, kind: str, records: Sequence[Mapping[str, JSON]]) -> Sequence[NetboxObject]:
        return read_shape(
            lambda: [from_rest(kind, record, self._object_fields) for record in records],
            self._session.source,
        )


def _query_value(value: JSON) -> JSON:
    """Return a filter's value as a URL has it; Python would write True."""
    return str(value).lower() if isinstance(value, bool) else value
