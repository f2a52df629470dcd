"""Fast runs: all that relies on private parts of ansible-core; without it runs are the same and cost more.

`fast_runs` is the only entry, and decides whether this ansible-core may be used so.  `fork_servers` starts
`fork_server`, a script that imports Ansible with `fork_plugins` and `fork_inventory` and forks the runs.
The plugins in `inventory_plugin/` and `callback/` are loaded by Ansible.
"""
