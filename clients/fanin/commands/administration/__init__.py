"""Subcommands about those who call a coordinator. Each has verbs, as in ``fanin token list``.

- ``verbs``: the choice of a verb
- ``rows``: tokens and devices as text and as JSON
- ``selection``: the devices that a command shows or changes
- ``certify``: certificates of devices by an authority, without a coordinator
- ``token``, ``device``, ``audit``: the subcommands
"""
