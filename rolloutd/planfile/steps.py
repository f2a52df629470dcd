"""Models of a plan's steps, made from the installed adapters.

It does not know what a kind does: parameters and capabilities come from the adapters' registrations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model, model_serializer

from rolloutd import plugin
from rolloutd.planfile.prepare import OneKind

JSON = Any

MAX_STEPS = 50
"""Isolators or checks of a plan; each takes minutes of every node's time."""


class Step(OneKind):
    """One mapping with one key: the kind, and under it the parameters."""

    @property
    def params(self) -> dict[str, JSON]:
        """The parameters, defaults filled in, durations in seconds."""
        section: plugin.Params = self.section
        return section.model_dump(mode="json", by_alias=True, exclude_none=True)

    def items(self) -> Iterator[tuple[str, dict[str, JSON]]]:
        yield self.kind, self.params

    @model_serializer(mode="plain")
    def content(self) -> dict[str, JSON]:
        return {self.kind: self.params}


def usable_adapters(group: str) -> dict[str, plugin.Registration]:
    """Return the installed adapters of a port that files may name, by kind."""
    return {
        kind: adapter
        for kind, adapter in plugin.installed_adapters(group).items()
        if adapter.params is not None
    }


class _Where(plugin.Params):
    """The key that every step of a plan has besides its adapter's own."""

    where: plugin.SelectorText = Field(
        default=plugin.ABSENT,
        description="Label selector of the nodes that the item is for; the key `kind` is the node's kind, "
        "`host`, `kubernetes` or `cluster`. All nodes that the adapter can handle if not given.",
    )


def step_model(
    name: str, doc: str, group: str, common: type[plugin.Params] | None = None, base: type[OneKind] = Step
) -> type[Any]:
    """Return the model of a mapping whose one key, besides those of `base`, is an installed kind of a port.

    `common` has the keys of every kind besides its adapter's own.
    """
    # Kinds are aliases: a third party's kind need not be a Python identifier.
    fields: dict[str, Any] = {
        f"kind_{number}": (
            params_model(adapter, common),
            Field(default=None, alias=kind, description=(adapter.params.__doc__ or "").split("\n")[0]),
        )
        for number, (kind, adapter) in enumerate(usable_adapters(group).items())
    }
    return create_model(name, __base__=base, __doc__=doc, **fields)


def params_model(
    adapter: plugin.Registration, common: type[plugin.Params] | None, **fields: Any
) -> type[plugin.Params]:
    """Return the model of an adapter's parameters, with the keys of `common` and further fields."""
    assert adapter.params is not None
    if common is None:
        return adapter.params
    # Of the adapter's own name and description: people see one mapping with the keys of both.
    bases = (adapter.params, common)
    return create_model(adapter.params.__name__, __base__=bases, __doc__=adapter.params.__doc__, **fields)


if TYPE_CHECKING:
    IsolateStep = Step
    TrafficStep = Step
    VerifyStep = Step
else:
    IsolateStep = step_model(
        "IsolateStep", "One way to take the node out of service.", plugin.ISOLATORS, _Where
    )
    TrafficStep = step_model(
        "TrafficStep", "One way to see whether client traffic runs on a node.", plugin.PROBES, _Where
    )
    VerifyStep = step_model("VerifyStep", "One check that the node must pass.", plugin.CHECKS, _Where)
