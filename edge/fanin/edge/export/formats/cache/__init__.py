"""Converted graphs that are kept on disk, so that an export of the same graphs need not convert them again.

- ``digests``: the key of traced graphs.
- ``files``: the folder of the cache.
- ``converted``: a conversion that asks the cache first.
"""
