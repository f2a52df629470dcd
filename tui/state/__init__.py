"""What the daemon reported, and what to ask again; no Textual, no threads."""
