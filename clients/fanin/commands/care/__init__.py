"""Subcommands that care for a coordinator over months.

Reading order:

- ``prune``: remove what a Run no longer needs
- ``backup``: back up and restore the folder of a coordinator
"""
