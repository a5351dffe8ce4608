"""The ONNX format: traced graphs as ONNX models, and their int8 form.

- ``writer``: a traced Signature as a model, without stack traces and paths; ``translate`` writes its operators, and
  ``optimize`` simplifies them.
- ``fuse``: rewrites of a train graph into fewer operators; ``graph`` is the editable graph behind it.
- ``int8``: the quantized ``infer`` model, with the measured ``ranges`` of its activations; ``slots`` finds the slots.
"""
