"""Administration: who may call, what is known of each device, and the record of every change.

Modules, in reading order:

    token_files.py   the first tokens, in files
    audit.py         the entries around a change, and the head of the log
    commands.py      commands to Runs
    tokens.py        tokens of people and enrollment tokens
    devices.py       devices: record, state, bans
    servicer.py      the gRPC service of all of them
"""
