"""The TFLite format: traced graphs as one TFLite file, and their int8 form.

- ``writer``: all Signatures as one file; ``converter/`` calls the converter.
- ``operators``: the operators that every runtime has.
- ``file``, ``flatgraph``: the bytes of a file, and a graph that can be edited.
- ``frozen``: frozen weights as int8 in train graphs.
- ``int8``: the quantized ``infer`` graph, from ``bound`` (parameters as constants), ``ranges`` (of activations),
  ``constants`` (kernels, biases and slots) and ``quantizer`` (the walk over the operators).
"""
