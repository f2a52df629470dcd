"""One refresh: check the token and the names, then read the lists.  It blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rolloutd.adapters.netbox import custom_fields, rest
from rolloutd.adapters.netbox.filter_match import compared_fields, find_mismatch
from rolloutd.adapters.netbox.http import HttpStatus, NetboxSession
from rolloutd.adapters.netbox.objects import Mapper, NetboxObject, from_rest, read_shape
from rolloutd.ports import JSON

NOT_FOUND, FORBIDDEN = 404, 403

VIEW_RIGHTS = {"devices": "dcim.view_device", "virtual_machines": "virtualization.view_virtualmachine"}

ObjectKey = tuple[str, int]


class Reader:
    def __init__(
        self,
        session: NetboxSession,
        kinds: Sequence[str],
        filters: Mapping[str, JSON],
        mapper: Mapper,
    ) -> None:
        self._session = session
        self._kinds = kinds
        # As a URL has it; Python would write True.
        self._filters = {
            name: str(value).lower() if isinstance(value, bool) else value for name, value in filters.items()
        }
        self._mapper = mapper
        self._fields = mapper.fields | compared_fields(filters)
        self._custom_fields: Mapping[str, custom_fields.CustomField] = {}

    def check_token(self) -> None:
        """Raise SourceFailed unless the token is valid."""
        try:
            self._session.check("/api/authentication-check/")
        except HttpStatus as error:
            if error.status != NOT_FOUND:
                raise
            self._session.check("/api/status/")  # before NetBox 4.5

    def check(self) -> None:
        """Raise SourceFailed unless the token is valid and the server knows the custom fields."""
        self.check_token()
        if not custom_fields.needs_check(self._filters, self._mapper.paths):
            return
        known = custom_fields.read_custom_fields(self._session)
        custom_fields.check_filters(self._session, self._kinds, self._filters, known)
        custom_fields.check_paths(self._session, self._kinds, self._mapper.paths, known)
        self._custom_fields = known

    def find_missing_rights(self) -> list[str]:
        """Return a sentence for each right that the token lacks; raises SourceFailed for others."""
        rights = {rest.PATHS[kind]: VIEW_RIGHTS[kind] for kind in self._kinds}
        if custom_fields.needs_check(self._filters, self._mapper.paths):
            rights[custom_fields.PATH] = "extras.view_customfield"
        problems = []
        for path, right in rights.items():
            try:
                rest.read_page(self._session, path, {"limit": 1, "fields": "id"})
            except HttpStatus as error:
                if error.status != FORBIDDEN:
                    raise
                problems.append(str(self._session.error(f"its token lacks {right}", "grant this right")))
        return problems

    def find_excess_rights(self) -> list[str]:
        """Return a sentence if the token may write, which the daemon never does."""
        kinds = [kind.replace("_", " ") for kind in self._kinds if self._session.may_write(rest.PATHS[kind])]
        problem, remedy = f"its token may write {' and '.join(kinds)}", "give it a read-only token"
        return [str(self._session.error(problem, remedy))] if kinds else []

    def read_all(self) -> dict[ObjectKey, NetboxObject]:
        """Return all objects; raises SourceFailed, also if there is none or one does not match the filter."""
        found = [each for kind in self._kinds for each in self._read_kind(kind, self._filters)]
        if not found:
            raise self._session.error("no object matches", "check `filter` and the token's rights")
        return {(each.kind, each.id): each for each in found}

    def read_some(self, keys: Iterable[ObjectKey]) -> dict[ObjectKey, NetboxObject]:
        found: dict[ObjectKey, NetboxObject] = {}
        for kind in self._kinds:
            ids = sorted(number for of_kind, number in keys if of_kind == kind and self._has_id(number))
            if ids:
                records = self._read_kind(kind, {**self._filters, "id": ids})
                found |= {(kind, each.id): each for each in records}
        return found

    def _has_id(self, number: int) -> bool:
        """Return whether the filter's own `id`, which the request's replaces, has the object."""
        wanted = self._filters.get("id")
        return wanted is None or str(number) in map(str, wanted if isinstance(wanted, list) else [wanted])

    def _read_kind(self, kind: str, filters: Mapping[str, JSON]) -> Sequence[NetboxObject]:
        records = rest.list_objects(self._session, kind, filters, self._fields)
        types = {name: field.type for name, field in self._custom_fields.items()}
        object_fields = frozenset(name for name in types if types[name] in ("object", "multiobject"))
        return read_shape(lambda: self._parse(kind, records, object_fields), self._session.source)

    def _parse(
        self, kind: str, records: Sequence[Mapping[str, JSON]], object_fields: frozenset[str]
    ) -> Sequence[NetboxObject]:
        """Return the objects; raises SourceFailed for one that the filter should have excluded."""
        found = [from_rest(kind, record, object_fields) for record in records]
        for each in found:
            if name := find_mismatch(each, self._filters, self._custom_fields):
                problem = (
                    f"{(each.name or kind)[:60]} ({each.id}) does not match {name}, which NetBox ignored"
                )
                raise self._session.error(problem, "correct `filter`")
        return found
