"""What goes on beside the loop: which nodes there are, who is up, who could be isolated, who stays well.

Each part looks at the world and commits what it saw; none of them decides, and none knows another.
"""
