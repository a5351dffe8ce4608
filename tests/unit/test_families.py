"""Model families: their record, their lookup, and the family that a config names."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import pytest
from support.errors import raises
from support.outside import install_module
from torch import nn

from fanin.datacenter.config.records import record_of, row_of
from fanin.datacenter.config.settings import UNKNOWN_LAYOUT, LayoutSettings, ModelSettings
from fanin.datacenter.config.train_config import TrainConfig, check_config, parse_config
from fanin.datacenter.families.decoders import DECODER
from fanin.datacenter.families.family import FamilyModel
from fanin.datacenter.families.known import GROUP, family_model, family_named, family_names
from fanin.datacenter.models.decoder import DecoderConfig
from fanin.datacenter.planner.presets import model_named
from fanin.protos.errors import InvalidInput

MINIMAL = """
model.decoder = {{ num_layers = 4 }}
data = {{ text = "x.txt" }}
training = {{ batch_size = 8, learning_rate = 0.1 }}
stop = {{ steps = 2 }}
parallel = {{ mesh = "{axis}=2", microbatches = 2 }}
"""
MINIMAL_ROWS: Mapping[str, object] = MappingProxyType(
    {
        "data": {"text": "x.txt"},
        "training": {"batch_size": 8, "learning_rate": 0.1},
        "stop": {"steps": 2},
        "parallel": {"mesh": "pp=2", "microbatches": 2},
    }
)


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
    with pytest.raises(InvalidInput, match="FN-1377"):
        model_named("9b")


SOURCE = """
from fanin.datacenter.families.decoders import DECODER as FAMILY
WRONG = 3
"""

OTHER = """
from dataclasses import dataclass
from fanin.datacenter.families import Family

@dataclass(frozen=True)
class Sizes:
    width: int = 8

    def __post_init__(self):
        if self.width % 3:
            raise ValueError(f"width {self.width} is not a multiple of 3")

FAMILY = Family(config=Sizes, build=print, layout=print, tokens=print)
"""


@pytest.mark.parametrize(
    ("entry", "source", "error"),
    [
        (
            ("mine", "own_family:FAMILY"),
            "import nothing_of_this_name",
            r"the family 'mine' cannot be imported from own_family:FAMILY \(ModuleNotFoundError: .*\); repair that",
        ),
        (("mine", "own_family:MISSING"), SOURCE, r"cannot be imported from own_family:MISSING \(AttributeError"),
        (("mine", "own_family:WRONG"), SOURCE, "own_family:WRONG of the family 'mine' is 3, expected a Family"),
        (
            ("mine", "own_family:FAMILY"),
            OTHER.replace("frozen=True", "frozen=False"),
            r"Family of Sizes: config: got <class 'own_family.Sizes'>, expected a frozen dataclass of sizes",
        ),
        (("mine", "own_family:FAMILY"), OTHER, r"\[model.mine\]: width 8 is not a multiple of 3\n"),
        (("mime", "own_family:FAMILY"), SOURCE, "got unknown key 'mine', did you mean 'mime'"),
        (("qqqq", "own_family:FAMILY"), SOURCE, r"got unknown key 'mine', .*app, .*decoder, encoder, pretrained, qqqq"),
    ],
)
def test_a_package_that_is_broken_or_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: tuple[str, str], source: str, error: str
) -> None:
    install_module(tmp_path, entry, source, GROUP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_family", raising=False)
    path = tmp_path / "mine.toml"
    path.write_text("[model.mine]\nwidth = 8\n")
    with pytest.raises(InvalidInput, match=error):
        model_named(str(path))


def test_two_packages_with_one_family_are_both_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        info = tmp_path / name / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\nmine = {name}_family:FAMILY\n")
        monkeypatch.syspath_prepend(tmp_path / name)
    with pytest.raises(InvalidInput, match="FN-0212"):
        family_named("mine")


def test_a_package_adds_a_family_and_replaces_no_builtin_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = tmp_path / "first", tmp_path / "second"
    for site, name in zip(sites, ("decoder", "mine"), strict=True):
        site.mkdir()
        install_module(site, (name, f"{name}_family:FAMILY"), SOURCE, GROUP)
        monkeypatch.syspath_prepend(site)
    assert family_names() == ("decoder", "encoder", "pretrained", "mine")
    assert family_named("decoder") is DECODER
    assert "decoder_family" not in sys.modules
    assert family_model("mine", DecoderConfig()).family is DECODER


@pytest.mark.parametrize(
    ("part", "expected"), [("build", "Module"), ("layout", "Layout"), ("tokens", "TokenModel"), ("work", "Work")]
)
def test_a_function_of_a_family_that_returns_another_type_is_named(part: str, expected: str) -> None:
    family = replace(DECODER, **{part: lambda *arguments: "a text"})
    model = FamilyModel(name="mine", family=family, config=DecoderConfig())
    with pytest.raises(InvalidInput, match=f"Family 'mine': result of {part}: got 'a text', expected a {expected}"):
        model.build(3) if part == "build" else getattr(model, part)


@pytest.mark.parametrize("part", ["build", "layout", "tokens", "work", "files"])
def test_a_function_of_a_family_that_raises_is_named_with_its_line(part: str) -> None:
    def raise_key_error(*arguments: object) -> NoReturn:
        raise KeyError("a bug of mine")

    model = FamilyModel(name="mine", family=replace(DECODER, **{part: raise_key_error}), config=DecoderConfig())
    error = rf"^family 'mine': {part} raised KeyError: 'a bug of mine' \(test_families\.py:\d+\); correct it\n"
    with pytest.raises(InvalidInput, match=error):
        match part:
            case "build":
                model.build(3)
            case "files":
                model.files(nn.Identity())
            case _:
                getattr(model, part)


def test_an_error_of_fanin_in_a_function_of_a_family_is_unchanged() -> None:
    def raise_invalid_input(config: object) -> NoReturn:
        raise InvalidInput("layout: got 3 layers, expected 2")

    model = FamilyModel(name="mine", family=replace(DECODER, layout=raise_invalid_input), config=DecoderConfig())
    with pytest.raises(InvalidInput, match="FN-0002"):
        print(model.layout)


def test_a_family_without_layers_cannot_be_cut() -> None:
    family = replace(DECODER, layout=lambda config: UNKNOWN_LAYOUT)
    model = FamilyModel(name="mine", family=family, config=DecoderConfig())
    for axis, problem in (("pp", "names no list of layers to cut for pp"), ("tp", "has no plan that splits")):
        text = MINIMAL.format(axis=axis)
        config = parse_config(text, "train.toml")
        config = replace(config, model=replace(config.model, family=model))
        with pytest.raises(InvalidInput, match=f"got {axis} 2 for the family 'mine', whose layout {problem}.*take dp_"):
            check_config(config, 2)


def test_an_app_whose_layout_splits_nothing_is_refused_on_tp() -> None:
    layout = LayoutSettings(layers="layers", num_layers=2, inputs=("embed",), outputs=("head",))
    config = parse_config(MINIMAL.format(axis="tp"), "train.toml")
    config = replace(config, model=ModelSettings(app="own.py:app", layout=layout))
    message = "got tp 2 for the App own.py:app, whose layout has no plan .*, or add a plan to \\[model.layout\\]"
    with pytest.raises(InvalidInput, match=message):
        check_config(config, 2)
    plan = {"layers.*.up": "column", "layers.*.down": "row"}
    check_config(replace(config, model=ModelSettings(app="own.py:app", layout=replace(layout, plan=plan))), 2)


def test_a_config_is_read_and_written_under_its_familys_name() -> None:
    config = parse_config(MINIMAL.format(axis="pp"), "train.toml")
    row = row_of(config)
    assert isinstance(row, dict)
    assert row["model"]["decoder"]["vocabulary"] == 256
    assert "family" not in row["model"]
    assert record_of(TrainConfig, {"model": row["model"], **MINIMAL_ROWS}, "row").model == config.model


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("decoder = {}\nmodel.encoder = {}", "got decoder and encoder, expected one of decoder, encoder, pretrained"),
        ("family = 3", "got unknown key 'family'"),
    ],
)
def test_a_model_has_one_family(model: str, error: str) -> None:
    with pytest.raises(InvalidInput, match=error):
        parse_config(MINIMAL.format(axis="pp").replace("decoder = { num_layers = 4 }", model), "train.toml")


@pytest.mark.parametrize(
    ("part", "value", "expected"),
    [
        ("config", dict, "a frozen dataclass of sizes"),
        ("build", None, "a function of the config; see docs/howto/families.md"),
        ("layout", {}, "a function of the config; see docs/howto/families.md"),
        ("tokens", 5, "a function of the config; see docs/howto/families.md"),
        ("work", None, "a function of the config; see docs/howto/families.md"),
        ("files", "", "a function of the config; see docs/howto/families.md"),
        ("presets", {"small": 5}, "a dict of DecoderConfig by name"),
        ("planned", 1, "true or false"),
    ],
)
def test_a_family_with_a_wrong_part_is_refused(part: str, value: object, expected: str) -> None:
    subject = "Family of an unknown config" if part == "config" else "Family of DecoderConfig"
    with raises(InvalidInput, f"{subject}: {part}: got {value!r}, expected {expected}"):
        replace(DECODER, **{part: value})  # type: ignore[arg-type]  # wrong on purpose
