"""Model families: their record, their lookup, and what a config names."""

from pathlib import Path

import pytest

from fanin.datacenter.families.known import family_model
from fanin.datacenter.models.decoder import DecoderConfig
from fanin.datacenter.planner.presets import model_named
from fanin.protos.errors import InvalidInput


def test_models_are_named_or_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[model.decoder]\nwidth = 128\ntied = true\n")
    assert model_named(str(path)) == family_model("decoder", DecoderConfig(width=128, tied=True))
    assert model_named("8b").layout.sizes.num_layers == 32
    for text, message in (
        ("[model.decoder]\nwidht = 3\n", r"\[model.decoder\]: got unknown key 'widht', did you mean 'width'"),
        ("[model.decoder]\nwidth = 1.5\n", "model.decoder.width: got 1.5, expected int"),
        ("[model.decoder]\nwidth = true\n", "model.decoder.width: got True, expected int"),
        ("width = 3\n", "model: got nothing, expected one of app, decoder, encoder, pretrained"),
        ('model.app = "a:b"\n', r"got an App in \[model\], expected a family: decoder"),
        ("[model", "is not TOML"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidInput, match=message):
            model_named(str(path))
    with pytest.raises(InvalidInput, match=r"got '9b', expected a \.toml file or one of tiny, 8m"):
        model_named("9b")
