"""Runner whose playbooks AWX runs: one job and one inventory for each run."""
