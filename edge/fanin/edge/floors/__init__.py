"""The privacy floor: the least privacy with which a device takes part, from a signed manifest or from its owner.

Modules in reading order:

    floor    the floor, what a Round promises of it, and the floor that satisfies two others
    rows     its form in JSON and TOML, and the errors of a wrong one
"""
