"""The data of devices.

Reading order:

- ``examples``: inputs and targets of a model
- ``stores``: the source of a device's examples
- ``npz``: examples in .npz files
- ``batching``, ``partitions``: batches, held-out parts and non-IID partitions
- ``digits``: the digits in the wheel
- ``public``, ``files``: public data sets, and the download and verification of their files
"""
