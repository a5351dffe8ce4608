"""From graphs to files, in each graph format.

- ``graphs``: all graphs of an App in one format, and ``FORMATS``, one record for each format.
- ``manifest``: the manifest of a Bundle, and its artifacts.
- ``preprocess``: the graph from raw data to the input of the module.
- ``onnx/``, ``tflite/``: the formats; ``int8/`` has what their quantization shares.
- ``cache``: converted graphs on disk, by a digest of the traced ones.
- ``apart``: a call in a fork, to build formats in parallel.
"""
