"""Files on this machine: artifacts, archives of sources, keys."""
