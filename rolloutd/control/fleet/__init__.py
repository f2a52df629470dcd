"""The fleet whatever its rollouts: slots, holds, freezes, inventory, teams, changes."""
