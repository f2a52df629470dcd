"""The reference playbooks by real Ansible on nodes of this machine."""
