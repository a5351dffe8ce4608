"""Data for simulated clients.

Reading order:

- ``loading``: data sets by name, and those of other libraries; ``tables``: CSV and Parquet
- ``partitioning``: ``partition``, the examples of each client; ``partitioners``: the ways to spread them
- ``figures``: the figure of a partition, and files of figures
- ``contract``: ``check_partitioner``, the contract of a partitioner
"""
