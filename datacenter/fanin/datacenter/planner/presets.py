"""Models for planning, by the name of a preset or from a TOML file."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from fanin.datacenter.config.records import record_of
from fanin.datacenter.config.settings import ModelSettings
from fanin.datacenter.families.family import FamilyModel
from fanin.datacenter.families.known import FAMILIES, family_model, family_named, family_names
from fanin.protos.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDocument:
    """The part of a job's config that planning reads."""

    model: ModelSettings


def model_named(text: str) -> FamilyModel:
    """Return a preset by its name, or the family's table ``[model.NAME]`` of a TOML file.

    Raises:
        InvalidInput: the name is unknown, or the file cannot be read, is not TOML or has wrong fields.
    """
    path = Path(text)
    if path.suffix != ".toml":
        return _preset(text)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise InvalidInput(f"model: {path} is not TOML ({exc})", code="FN-1201") from exc
    except OSError as exc:
        raise InvalidInput(
            f"model: {path} cannot be read ({exc.strerror}), expected a .toml file or a preset", code="FN-1201"
        ) from exc
    settings = record_of(PlannedDocument, {"model": document.get("model", {})}, str(path)).model
    if settings.family is None:
        raise InvalidInput(
            f"{path}: got an App in [model], expected a family: {', '.join(family_names())}", code="FN-1378"
        )
    return settings.family


def _preset(text: str) -> FamilyModel:
    # The families of fanin come first: no other package is imported for their presets.
    for name in family_names():
        presets = family_named(name).presets
        if text in presets:
            return family_model(name, presets[text])
    known = ", ".join(preset for family in FAMILIES.values() for preset in family.presets)
    raise InvalidInput(f"model: got {text!r}, expected a .toml file or one of {known}", code="FN-1377")
