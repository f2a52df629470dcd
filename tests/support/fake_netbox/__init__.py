"""A NetBox on a loopback port that answers as NetBox 4.6 did: REST, paging, tokens, errors."""

from tests.support.fake_netbox.fleet import Fleet
from tests.support.fake_netbox.server import FakeNetbox, Token

__all__ = ["FakeNetbox", "Fleet", "Token"]
