"""Administration: who may call, what is known of each device, and the record of every change.

Modules, in reading order:

    token_files.py   the first tokens, in files
"""
