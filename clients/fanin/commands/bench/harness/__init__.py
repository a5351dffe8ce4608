"""Parts that the benchmarks share: the coordinator under test, the load on it, and the report.

Reading order:

- ``site``: a coordinator with one Run, and the options of a benchmark
- ``device``: a device process that trains nothing
- ``crowd``: many light devices in one process
- ``callers``: a process whose threads check in
- ``bare``: the bare gRPC stream that a Round is compared with
- ``masked``: a secure aggregation in one process
- ``rss``: memory and processor time of a process
- ``report``: medians, samples and the machine, as text and as JSON
"""
