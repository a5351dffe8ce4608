"""What a device accepts, and what it knows of its own privacy.

Modules in reading order:

- ``owner``: the policy of the device's owner, ``policy.toml``
- ``ledger``: the device's own ledger, ``privacy.json``: Rounds, mechanisms and losses by Run
- ``guard``: refuses Assignments below the floor, and writes the ledger before an Update leaves
"""
