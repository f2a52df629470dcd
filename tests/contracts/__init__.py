"""One suite per port, passed by its in-memory fake and by every real adapter."""
