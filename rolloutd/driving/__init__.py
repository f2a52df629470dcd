"""One node at a time: from the core's next action to what was done and what came of it.

Each driver looks, asks the core, records the intent, acts and records the outcome, in this order always.
It is told of adapters through its gear, and knows no other node and no socket.
"""
