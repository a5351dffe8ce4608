"""``fanin completion``: scripts that let a shell complete subcommands, verbs, options, values and names.

Reading order:

- ``completion``: the command
- ``words``: what is completed, from the help of each command
- ``scripts``: the script of each shell
- ``names``: the Runs and devices of a coordinator on this machine
"""
