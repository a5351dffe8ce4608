"""The backends that run the trainings of a simulation: this process, worker processes, or a Ray cluster.

Reading order:

- ``backend``: the Protocol ``Backend``, and ``ThisProcess``
- ``processes``: worker processes of loky on this machine
- ``ray_cluster``: tasks of a Ray cluster; the only module that imports ray
- ``opening``: the backend that the settings name
"""
