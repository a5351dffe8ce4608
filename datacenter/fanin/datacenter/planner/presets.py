"""Decoder configs by name or from a TOML file, for planning without a model."""

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Final

from fanin.datacenter.models.decoder import DecoderConfig
from fanin.protos.errors import InvalidInput

PRESETS: Final[Mapping[str, DecoderConfig]] = MappingProxyType(
    {
        "tiny": DecoderConfig(),
        "8m": DecoderConfig(
            vocabulary=8192, width=256, num_layers=6, num_heads=8, num_kv_heads=4, feed_forward=704, tied=True
        ),
        "125m": DecoderConfig(
            vocabulary=32_000, width=768, num_layers=12, num_heads=12, num_kv_heads=12, feed_forward=2048
        ),
        "350m": DecoderConfig(
            vocabulary=32_000, width=1024, num_layers=24, num_heads=16, num_kv_heads=16, feed_forward=2816
        ),
        "1.5b": DecoderConfig(
            vocabulary=32_000, width=2048, num_layers=28, num_heads=16, num_kv_heads=16, feed_forward=5504
        ),
        "8b": DecoderConfig(
            vocabulary=128_256,
            width=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            feed_forward=14_336,
            rotary_base=500_000.0,
        ),
        "70b": DecoderConfig(
            vocabulary=128_256,
            width=8192,
            num_layers=80,
            num_heads=64,
            num_kv_heads=8,
            feed_forward=28_672,
            rotary_base=500_000.0,
        ),
    }
)
"""Configs by name. ``8b`` and ``70b`` have the sizes of Llama 3 (arXiv 2407.21783, table 3)."""
TABLE: Final = "model.decoder"


def config_of(text: str) -> DecoderConfig:
    """Return a preset by its name, or the table ``[model.decoder]`` of a TOML file.

    Raises:
        InvalidInput: the name is unknown, or the file is not TOML or has wrong fields.
    """
    if text in PRESETS:
        return PRESETS[text]
    path = Path(text)
    if path.suffix != ".toml":
        raise InvalidInput(f"model: got {text!r}, expected a .toml file or one of {', '.join(PRESETS)}")
    try:
        document = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise InvalidInput(f"model: {path} is not TOML ({exc})") from exc
    model = document.get("model")
    table = model.get("decoder") if isinstance(model, dict) else None
    known = {field.name: type(field.default) for field in fields(DecoderConfig)}
    if not isinstance(table, dict):
        raise InvalidInput(f"model: {path} has no table [{TABLE}], expected one with some of {', '.join(known)}")
    for name, value in table.items():
        if name not in known or not isinstance(value, known[name]) or isinstance(value, bool) != (known[name] is bool):
            expected = known[name].__name__ if name in known else f"one of {', '.join(known)}"
            raise InvalidInput(f"model: got {name} = {value!r} in {path}, expected {expected}")
    return DecoderConfig(**table)
