"""Commands for the people at each machine, without an operator's token. They need the core install alone.

- ``options``: the options of ``fanin join``
- ``status``: the state of a device
- ``policy``: the privacy floor of a device, for its owner
- ``doctor``: why a device or a coordinator cannot be reached
- ``explain``: what a code of an error means
"""
