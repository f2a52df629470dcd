"""Everything that speaks ssh outside Ansible: the shell, checks, an isolator, the observer."""
