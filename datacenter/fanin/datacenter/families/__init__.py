"""Families: the kinds of models that a config names as ``[model.NAME]``, one record each.

Other rooms ask the record for a module, its layout, its tokens and its FLOPs, so they need no code for a family. Other
distributions add families by the entry point ``fanin.families`` (docs/families.md).

Modules, in reading order:

- ``family``: the record of a family, and a model of a family.
- ``decoders``: the family ``decoder``, with its presets.
- ``encoders``: the family ``encoder``.
- ``folders``: the family ``pretrained``, models of ``transformers`` from their folders.
- ``known``: all families by name.
"""

from fanin.datacenter.families.family import Family, ModelFiles, TokenModel

__all__ = ["Family", "ModelFiles", "TokenModel"]
