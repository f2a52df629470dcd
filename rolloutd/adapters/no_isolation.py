"""Registration of the isolator `none`: the plan's word that a node needs no isolation.

It has no adapter: the core leaves such a node in service.
"""

from __future__ import annotations

from rolloutd.plugin import Capability, Params, Registration


class NoIsolationParams(Params):
    """Leaves the node in service while it is changed."""


NONE = Registration(None, NoIsolationParams, frozenset({Capability.STAYS_IN_SERVICE}))
