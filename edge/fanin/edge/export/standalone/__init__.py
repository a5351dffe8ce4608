"""Standalone models: one plain file with a Version's parameters inside, for onnxruntime or LiteRT without fanin.

- ``quantized``: the Bundle's own int8 graph, filled; it needs no torch.
- ``floats``: the float graph, traced from the App, because a Bundle has none.

Both have the input ``x`` and the output ``logits``.
"""
