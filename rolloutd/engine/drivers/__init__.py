"""Driver of one node: from the core's next action to its recorded outcome.

It knows neither adapters nor other nodes.
"""
