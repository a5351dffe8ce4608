"""Ranks: the processes of a job, their mesh, their device and their process group.

Modules, in reading order:

- ``mesh``: the shape of a job: ranks along each axis.
- ``axes``: the groups that sums run over, and a rank's part of a batch.
- ``devices``: the device of a rank.
- ``first``: work that the first rank does for all.
- ``elastic``: a rank's process group, stop signal and parent.
"""
