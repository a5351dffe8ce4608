"""Families: the kinds of models that a config names as ``[model.NAME]``, one record each.

Other rooms ask the record for a module, its layout, its tokens and its FLOPs, so they need no code for a family. Other
distributions add families by the entry point ``fanin.families`` (docs/howto/families.md).

Modules, in reading order:

- ``family``: the record of a family, and a model of a family.
- ``decoders``: the family ``decoder``, with its layout and presets.
- ``encoders``: the family ``encoder``, with its layout.
- ``folders``: the family ``pretrained``, models of ``transformers`` from their folders.
- ``known``: all families by name.
- ``two_ranks``: a step on two ranks, for the contract.
- ``contract``: the check for a family of one's own. It loads the engine, so it is imported with its first use.
"""

from typing import TYPE_CHECKING

from fanin.datacenter.families.family import Family, ModelFiles, TokenModel
from fanin.datacenter.models.seeding import seeded
from fanin.datacenter.parallel.layout import Layout, ModelSizes
from fanin.datacenter.watch.flops import Work

if TYPE_CHECKING:
    from fanin.datacenter.families.contract import check_family

__all__ = ["Family", "Layout", "ModelFiles", "ModelSizes", "TokenModel", "Work", "check_family", "seeded"]


def __getattr__(name: str) -> object:
    if name != "check_family":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fanin.datacenter.families.contract import check_family

    return check_family


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
