"""The shell of rolloutd: everything that talks to the world and obeys the core."""

__version__ = "0.2.0"
