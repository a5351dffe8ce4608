"""The coordinator. ``coordinator`` is its side towards devices, ``runs`` towards operators, ``rounds`` its heart."""
