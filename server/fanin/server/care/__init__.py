"""Care over months: what a coordinator does for its folder besides serving.

Modules, in reading order:

    pruner.py       removes what the retention of each Run does not keep
    space.py        the free bytes of the disk, and the sizes of the parts of the folder
    forecast.py     the growth of the folder, and the days until the disk is full
    notify.py       signs of life for a service manager
    places.py        where a backup is stored: a folder or an object store
    copies.py        copies, verifies and replaces the files of a backup that never change
    backup.py       copies the folder of a coordinator that serves
    certificates.py the certificate, renewed while the coordinator serves
    restore.py      writes a new folder from a backup
"""
