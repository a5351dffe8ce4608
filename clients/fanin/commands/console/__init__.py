"""Helpers that the subcommands share.

Reading order:

- ``terminal``: typed options, progress, JSON output, the connection of an operator
- ``usage``: wrong usage, which ends with exit status 2
- ``streams``: standard output, standard error and the log, which escape the text of others
- ``others``: subcommands of other packages
- ``show``: Runs and their events as text and as JSON
- ``tables``: tables as wide as the terminal
- ``samples``: data files as inputs of a model; ``predictions``: its outputs as classes
- ``splits``: the data of a simulation; ``simulated``: its output; ``result_files``: the files of its results
- ``processes``: child processes of a command
"""
