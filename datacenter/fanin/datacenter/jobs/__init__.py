"""Jobs: the launcher of a training job, and the program of its ranks.

Modules, in reading order:

- ``launch``: the launcher; ``train`` is the public function.
- ``calls``: calls to the caller of ``train`` between two steps.
- ``torchrun``: torchrun as a child process, restarts and machines.
- ``ranks``: starts torchrun's agent, and ranks from a process that has imported torch.
- ``agent``: torchrun's agent with the changes that a job needs.
- ``job``: the program of one rank.
- ``balance``: cuts the pipeline of a job by measured layer times.
- ``initial``: the values that a job starts from.
- ``comparison``: compares a module on the mesh with the complete module, before the first step.
- ``monitor``: everything that one rank observes while it trains.
- ``publish``: from a job's values to a Run's next Version.
"""
