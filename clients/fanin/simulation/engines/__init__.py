"""The engines that train the clients of a simulation.

- ``choice``: ``engine = graph | vmap | auto``, and the measurement behind ``auto``
- ``exporting``: the Bundle of an App, also of one that cannot be exported
- ``vectorized``: the clients of a Round side by side in torch
"""
