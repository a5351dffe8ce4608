"""Engines: one module for each inference library. No other file imports the library.

- ``onnx``: onnxruntime
- ``reference``: ONNX's reference evaluator, for comparison
- ``litert``: LiteRT
- ``tflite``: tflite-runtime
- ``interpreter``: the interface that the two TFLite libraries share
- ``flatbuffer``: bounds check of TFLite files
"""
