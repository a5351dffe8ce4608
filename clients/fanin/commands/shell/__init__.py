"""``fanin completion``: scripts that let a shell complete subcommands and options.

Reading order:

- ``completion``: the command
- ``scripts``: the script of each shell
"""
