"""Runtimes: inference libraries behind one contract. Each library is imported by one file only.

Modules in reading order:

    base          the contract
    available     select a runtime
    graphs        Signatures over any engine: checks, evaluation, prediction
    stepping      the train step over any engine
    models        graph files from any source, and ``preprocess``
    onnx          onnxruntime
    tflite        LiteRT and tflite-runtime
    flatbuffer    bounds check of TFLite files
    reference     ONNX's reference evaluator, for comparison
    quality       quality of a Version and its limits
    measure       measurement of quality
    evaluations   quality as integer statistics
"""
