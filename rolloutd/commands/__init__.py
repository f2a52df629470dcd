"""Commands of people, teams and services: rules, refusals and the resulting events.

The caller's identity comes from the socket or a token.  It knows no HTTP.
"""
