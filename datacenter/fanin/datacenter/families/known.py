"""All families by name: those of fanin, and those of other distributions by entry point."""

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

from fanin.datacenter.families.decoders import DECODER
from fanin.datacenter.families.encoders import ENCODER
from fanin.datacenter.families.family import AnyFamily, Family, FamilyModel
from fanin.datacenter.families.folders import PRETRAINED
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.protos.plans.named import check_single, installed

GROUP: Final = "fanin.families"
FAMILIES: Final[Mapping[str, AnyFamily]] = MappingProxyType(
    {"decoder": DECODER, "encoder": ENCODER, "pretrained": PRETRAINED}
)
"""The families of fanin. No other distribution can replace them."""


def family_names() -> tuple[str, ...]:
    """Return the names of all families that are installed here. Nothing is imported for it."""
    return tuple(dict.fromkeys((*FAMILIES, *sorted(installed(GROUP)))))


def is_family(name: str) -> bool:
    """Return whether a family of this name is installed here. Nothing is imported for it."""
    return name in FAMILIES or name in installed(GROUP)


def family_named(name: str) -> AnyFamily:
    """Return a family by name.

    Raises:
        InvalidInput: no family has this name, two packages have it, its package cannot be imported, or its entry point
            is no Family.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    entry = installed(GROUP).get(name)
    if entry is None:
        near = get_close_matches(name, family_names(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidInput(
            f"model: got family {name!r}, expected one of {', '.join(family_names())}{hint}", code="FN-1211"
        )
    try:
        check_single("model: family", name, GROUP)
    except InvalidPlan as exc:
        raise InvalidInput(str(exc), code=exc.code) from exc
    try:
        family: object = entry.load()
    except Exception as exc:  # Any error: the code comes from another package.
        text = " ".join(str(exc).split())
        raise InvalidInput(
            f"model: the family {name!r} cannot be imported from {entry.value} ({type(exc).__name__}: {text}); repair "
            "that package",
            code="FN-1212",
        ) from exc
    if not isinstance(family, Family):
        raise InvalidInput(
            f"model: {entry.value} of the family {name!r} is {family!r}, expected a Family of "
            "fanin.datacenter.families; correct that package",
            code="FN-1212",
        )
    return family


def family_model(name: str, config: object) -> FamilyModel:
    """Return a model of a family. Raises InvalidInput as ``family_named`` does."""
    return FamilyModel(name=name, family=family_named(name), config=config)
