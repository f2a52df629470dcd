"""A flag file on the node that takes it out of service."""
