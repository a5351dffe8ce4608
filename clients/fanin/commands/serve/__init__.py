"""``fanin serve``: a coordinator in one process.

Modules:

- ``command``: the options of the command
- ``coordinator``: the coordinator, composed of its parts
- ``page``: its page for browsers
"""
