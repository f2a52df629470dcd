"""One suite per port, passed by its in-memory twin and by every real adapter."""
