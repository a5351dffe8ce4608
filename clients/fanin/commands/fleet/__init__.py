"""Subcommands that ask devices and train nothing.

- ``stats``: statistics of the devices' examples
- ``evaluate``: a Version on the validation parts of some devices
"""
