"""Config: the settings of a job, and the checks that need no process.

Every other room may read a config. This room starts nothing and writes nothing.

Modules, in reading order:

- ``settings``: the tables of a config.
- ``rates``: the table ``[rate]``, and its checks.
- ``communication``: the table ``[communication]``, and its checks.
- ``train_config``: the complete config, and its checks.
- ``records``: frozen records from TOML and JSON, and back.
"""
