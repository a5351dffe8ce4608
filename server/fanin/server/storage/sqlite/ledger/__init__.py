"""The privacy ledgers of populations, and the seeds of noise, over SQLite.

Modules, in reading order:

    places   whether the database is in the folder that wrote it
    rows     populations and the rows of their ledgers
    seeds    the seeds: recorded with a row, erased with the Updates, and left out of backups
"""
