"""Checkpoints: saving a job's state, resuming from it, and weights in and out.

Modules, in reading order:

- ``resumable``: a job's checkpoints, as the training loop uses them.
- ``trace``: the losses and evaluations so far.
- ``checkpoint``: saving and loading of sharded state by all ranks.
- ``contents``: the index, checks and errors of one checkpoint.
- ``progress``: progress.json and the marker LATEST.
- ``integrity``: which checkpoints of a folder are intact.
- ``agreement``: one outcome for all ranks.
- ``named_state``: an engine's tensors by name.
- ``weights``: safetensors files.
- ``trained``: the values that a job has left, from any of its files.
- ``seeds``: the file with the initial parameters of a job.
"""
