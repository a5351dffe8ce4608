"""``fanin study``: a study of simulations from a TOML file.

Reading order:

- ``files``: the file of a study
- ``command``: the command
"""
