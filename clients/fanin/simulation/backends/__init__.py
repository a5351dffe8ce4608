"""Where the trainings of a simulation run: in this process, in worker processes, or on a Ray cluster.

Reading order:

- ``backend``: the Protocol ``Backend``, and ``ThisProcess``
- ``processes``: worker processes of loky on this machine
- ``ray_cluster``: tasks of a Ray cluster; the only module that imports ray
- ``opening``: the backend that the settings name
"""
