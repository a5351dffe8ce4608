"""Jobs: a training job from its config file to its result.

Modules, in reading order:

- ``settings``: the tables of a config.
- ``records``: frozen records from TOML and JSON, and back.
- ``config``: the whole config, and its checks.
- ``launch``: the launcher; ``train`` is the public function.
- ``torchrun``: torchrun as a child process, restarts and machines.
- ``agent``: the process that torchrun's ranks run under.
- ``job``: the program of one rank.
- ``jobfiles``: the files between the launcher and the ranks.
- ``folders``: checks and locks of folders.
- ``publish``: from a training into a Run's next Version.
"""
