"""The in-memory fakes of the ports."""
