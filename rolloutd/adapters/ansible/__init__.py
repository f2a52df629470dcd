"""Ansible: playbooks run as processes of their own, nodes found by ansible-inventory.

`runner` implements the Runner port, `inventory` the Inventory port.  Each run
has a directory (`run_directory`) and a supervising script that does not import
rolloutd (`wrapper`).  A callback plugin (`callback/`) writes the run's events,
and `progress` derives the result from them.  `stale_processes` ends processes
of older runs on a node, `processes` those of a run on this machine.  The daemon
never imports Ansible; it only runs Ansible's programs.  All that relies on
private parts of ansible-core is in `fast/`, and runs do without it.
"""
