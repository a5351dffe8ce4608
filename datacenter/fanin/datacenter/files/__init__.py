"""Files that the launcher and the ranks of a job exchange.

Modules, in reading order:

- ``jobfiles``: the files of a job's folder: its config, result and error.
- ``folders``: checks and locks of folders.
"""
