"""Subcommands about the Runs of a coordinator.

Reading order:

- ``run``: start a Run from a Plan
- ``private``: claim, unit and masks of a Plan as text
- ``runs``, ``describe``, ``watch``: list, show and follow Runs
- ``lifecycle``: pause, resume, stop, roll back and promote
- ``evaluations``: the metrics of Versions on held-out data
- ``fetch``: download a Version; ``standalone``: write it as a model that runs without fanin
- ``publish``: trained parameters become the next Version
- ``places``: the files and folders of a fetch, each replaced as a unit
- ``verify``: recompute the Versions of a Run from the coordinator's folder
"""
