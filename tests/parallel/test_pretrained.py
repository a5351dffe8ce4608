"""A model of ``transformers`` trains unchanged and is saved in its own format, without code or pickles."""

import json
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy

from fanin.datacenter.config.train_config import TrainConfig, check_config, parse_config
from fanin.datacenter.jobs.job import train
from fanin.datacenter.jobs.launch import launch
from fanin.datacenter.models import pretrained, pretrained_folder
from fanin.datacenter.parallel.settings import ParallelSettings
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.training.model import build_job_model
from fanin.protos.errors import InvalidInput, RuntimeMissing

pytestmark = pytest.mark.usefixtures("forked_agents")

VOCABULARY, LENGTH, NUM_WINDOWS, NUM_HELD = 37, 8, 6, 2
ROW: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}


@pytest.fixture(scope="module")
def library() -> ModuleType:
    """Return ``transformers``. The messages of its import are suppressed, as in fanin."""
    # Some names of the library load lazily, so one model is built here first.
    pretrained.module_of(ROW, "float32", 0, "here")
    return sys.modules["transformers"]


@pytest.fixture
def given(tmp_path: Path, library: ModuleType) -> "Given":
    return Given(tmp_path, library)


class Given:
    """A folder with a model, tokens for training, and the job that uses both."""

    def __init__(self, folder: Path, library: ModuleType) -> None:
        self.model, self.out, self._library = folder / "model", folder / "out", library
        self.model.mkdir()
        self.out.mkdir()
        generator = np.random.default_rng(0)
        self.tokens = generator.integers(0, VOCABULARY, (NUM_WINDOWS + NUM_HELD) * LENGTH, np.uint16)
        np.save(folder / "tokens.npy", self.tokens)
        self.text = f"""
            model.pretrained = {{ folder = "{self.model}" }}
            data = {{ tokens = "{folder / "tokens.npy"}", length = {LENGTH}, held_fraction = 0.25 }}
            training = {{ batch_size = {NUM_WINDOWS}, learning_rate = 0.01 }}
            stop = {{ steps = 3 }}
        """

    def write(self, **settings: object) -> nn.Module:
        """Save a model with the library, and return the model."""
        shard = settings.pop("max_shard_size", "1GB")
        dtype = str(settings.pop("dtype", "float32"))
        model = pretrained.module_of(ROW | settings, dtype, 3, "here")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(self.model, max_shard_size=shard)
        return model

    def read(self, folder: Path) -> nn.Module:
        """Return the model that the library loads from a folder."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._library.AutoModelForCausalLM.from_pretrained(folder)

    def config(self, **tables: dict[str, object]) -> TrainConfig:
        """Return the job."""
        return parse_config(self.text, "here", tables)

    def row(self, **settings: object) -> None:
        """Write only the config."""
        (self.model / pretrained_folder.CONFIG).write_text(json.dumps(ROW | settings))


def loss_of(model: nn.Module, tokens: np.ndarray) -> float:
    """Return the mean loss over next tokens, in the windows that a job uses."""
    flat = torch.from_numpy(tokens.astype(np.int64))
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(flat) - 1, LENGTH):
            inputs, targets = flat[start : start + LENGTH], flat[start + 1 : start + LENGTH + 1]
            logits = model(inputs[: len(targets)][None]).logits[0]
            total += float(cross_entropy(logits.double(), targets, reduction="sum"))
            count += len(targets)
    return total / count


@pytest.mark.parametrize(
    ("settings", "num_files"),
    [
        ({"tie_word_embeddings": False, "max_shard_size": "6KB"}, 4),
        ({"tie_word_embeddings": True, "dtype": "bfloat16"}, 1),
        ({"tie_word_embeddings": True, "model_type": "qwen2"}, 1),
    ],
    ids=["untied-shards", "tied-bfloat16", "tied-qwen2"],
)
def test_a_folder_is_trained_and_what_comes_out_is_one(
    given: Given, settings: dict[str, object], num_files: int
) -> None:
    given.write(**settings)
    assert len(list(given.model.glob("*.safetensors"))) >= num_files
    weights = given.out / "model.safetensors"
    result = train(given.config(checkpoints={"weights": str(weights)}), 0, 1)
    learned, held = np.split(given.tokens, [NUM_WINDOWS * LENGTH])
    # Each batch has all windows, so the first loss is that of the initial model.
    with torch.no_grad():
        began = given.read(given.model).float()
    assert result.metrics.trained.losses[0] == pytest.approx(loss_of(began, learned), abs=1e-5)
    assert result.metrics.trained.losses[-1] < result.metrics.trained.losses[0] - 0.1
    ended = given.read(given.out)
    assert ended.dtype == torch.float32
    assert (ended.lm_head.weight is ended.model.embed_tokens.weight) == settings["tie_word_embeddings"]
    assert result.metrics.trained.evaluated[-1].validation_loss == pytest.approx(loss_of(ended, held), abs=1e-5)
    assert set(load_file(weights)) == {name for name, _ in ended.named_parameters()}


def test_a_config_alone_begins_from_the_seed(given: Given) -> None:
    given.row()
    before = torch.random.get_rng_state()
    first, again, other = (build_job_model(replace(given.config(), seed=seed)).model.module for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before), "torch's own generator is left as it was"
    values = [dict(module.named_parameters()) for module in (first, again, other)]
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
    assert any(not torch.equal(values[0][name], values[2][name]) for name in values[0])
    assert {value.dtype for value in values[0].values()} == {torch.float32}


def test_what_older_versions_wrote_beside_the_weights_is_left_aside(given: Given) -> None:
    given.write(tie_word_embeddings=True)
    path = given.model / "model.safetensors"
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2), "lm_head.weight": torch.zeros(2)}
    expected = train(given.config(), 0, 1).metrics.trained.losses
    save_file(load_file(path) | more, path, {"format": "pt"})
    assert train(given.config(), 0, 1).metrics.trained.losses == expected


def test_no_code_of_the_folder_runs(given: Given, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    given.row(auto_map={"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}, attn_implementation="a/kernel")
    (given.model / "mine.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\nclass Mine: pass\n")
    assert len(train(given.config(), 0, 1).metrics.trained.losses) == 3
    given.row(model_type="mine", auto_map={"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"})
    with pytest.raises(InvalidInput, match="got model_type 'mine', expected one that transformers itself knows"):
        check_config(given.config(), 1)
    assert not marker.exists()


def _no_config(given: Given) -> None:
    (given.model / "config.json").unlink()


def _not_json(given: Given) -> None:
    (given.model / "config.json").write_text("{")


def _a_list(given: Given) -> None:
    (given.model / "config.json").write_text("[]")


def _a_pickle(given: Given) -> None:
    (given.model / "model.safetensors").unlink()
    (given.model / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def _other_names(given: Given) -> None:
    (given.model / "model.safetensors").rename(given.model / "consolidated.safetensors")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_no_config, "config.json: cannot be read (No such file or directory); expected the folder of a model"),
        (_not_json, "config.json: not JSON ("),
        (_a_list, "config.json: got list, expected an object"),
        (
            _a_pickle,
            "got weights in pytorch_model.bin, expected model.safetensors or model.safetensors.index.json: a pic",
        ),
        (
            _other_names,
            "got weights in consolidated.safetensors, expected model.safetensors or model.safetensors.index",
        ),
        (lambda given: given.row(quantization_config={}), "config.json: got a quantized model, expected one whose"),
        (lambda given: given.row(model_type=["llama"]), "got model_type ['llama'], expected one that transformers"),
        (lambda given: given.row(model_type="t5"), "got model_type 't5', expected a causal or a masked language model"),
        (lambda given: given.row(hidden_size="x"), "transformers cannot build this model (StrictDataclassFieldVal"),
        (
            lambda given: given.row(num_hidden_layers=-1),
            "cannot build this model (ValueError: got num_hidden_layers ",
        ),
        (lambda given: given.row(num_attention_heads=0), "cannot build this model (ZeroDivisionError"),
        (lambda given: given.row(hidden_act="nope"), "cannot build this model (KeyError: 'nope')"),
    ],
    ids=lambda value: "" if callable(value) else value[:24].replace(" ", "-"),
)
def test_a_folder_that_cannot_be_is_told_before_a_process_starts(
    given: Given, harm: Callable[[Given], None], said: str
) -> None:
    given.write()
    harm(given)
    with pytest.raises(InvalidInput) as caught:
        launch(given.config(), 1, given.out / "job")
    assert said in str(caught.value)
    assert not (given.out / "job").exists()


def test_a_mesh_that_the_folders_model_does_not_fit_is_told_before_a_process_starts(given: Given) -> None:
    given.row()
    config = replace(given.config(), parallel=ParallelSettings(mesh=MeshShape(tp=4)))
    with pytest.raises(InvalidInput, match="got kv heads 2 and tp 4, expected a multiple"):
        launch(config, 4, given.out / "job")


@pytest.mark.parametrize("plan", [{"layers.*.self_attn.q_proj": [1]}, {"layers.*.self_attn.q_proj": "rowwise"}])
def test_a_plan_in_the_folder_takes_no_place_of_the_librarys(given: Given, plan: dict[str, object]) -> None:
    given.row()
    usual = given.config().model.parallel_layout
    given.row(base_model_tp_plan=plan, base_model_pp_plan=plan)
    assert given.config().model.parallel_layout == usual
    assert "model.layers.*.self_attn.k_proj" in usual.plan


def test_the_folder_is_read_once(given: Given) -> None:
    given.row(bos_token_id=5, torch_dtype="float16")
    made = build_job_model(given.config())
    shutil.rmtree(given.model)
    assert made.files.exported is not None
    assert json.loads(made.files.exported) == ROW | {"bos_token_id": 5, "dtype": "float32"}


def _index(change: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        path = folder / pretrained_folder.INDEX
        row = json.loads(path.read_text())
        change(row["weight_map"])
        path.write_text(json.dumps(row))

    return changed


def _elsewhere(rows: dict[str, str]) -> None:
    rows["model.norm.weight"] = "../model.safetensors"


def _no_name(rows: dict[str, str]) -> None:
    rows["model.norm.weight"] = "\ud800.safetensors"


def _swapped(rows: dict[str, str]) -> None:
    rows["model.norm.weight"] = next(each for each in rows.values() if each != rows["model.norm.weight"])


def _a_shard_less(folder: Path) -> None:
    max(folder.glob("*.safetensors")).unlink()


def _no_map(folder: Path) -> None:
    (folder / pretrained_folder.INDEX).write_text("{}")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_index(_elsewhere), "got a tensor in '../model.safetensors', expected the name of a .safetensors file beside"),
        (_index(_swapped), "tensors: 1 missing, such as model.norm"),
        (_index(_no_name), "not a whole safetensors file ('utf-8' codec can't encode"),
        (_index(dict.clear), "got no weight_map, expected one from names of tensors to names of files"),
        (_no_map, "got no weight_map"),
        (_a_shard_less, "not a whole safetensors file (No such file"),
        (lambda folder: shutil.copy(folder / "config.json", folder / pretrained_folder.INDEX), "got no weight_map"),
        (lambda folder: (folder / pretrained_folder.INDEX).write_text("{"), "not JSON ("),
    ],
)
def test_weights_in_several_files_are_held_against_their_index(
    given: Given, harm: Callable[[Path], None], said: str
) -> None:
    given.write(max_shard_size="6KB")
    harm(given.model)
    with pytest.raises(InvalidInput) as caught:
        train(given.config(), 0, 1)
    assert str(caught.value).startswith(f"{given.model / pretrained_folder.INDEX}: ")
    assert said in str(caught.value)


def test_another_models_weights_and_too_many_tokens_are_told(given: Given) -> None:
    given.write()
    given.row(intermediate_size=32)
    with pytest.raises(InvalidInput, match=r"down_proj.weight: got F32 \[16, 24\], expected F32 \[16, 32\]"):
        train(given.config(), 0, 1)
    given.row(vocab_size=9)
    with pytest.raises(InvalidInput, match=r"tokens.npy: got 36 tokens, expected at most the model's 9"):
        train(given.config(), 0, 1)


def test_what_cannot_go_together_is_told(given: Given) -> None:
    given.write()
    with pytest.raises(InvalidInput, match=r"got weights .* in the folder that the model comes from, expected another"):
        given.config(checkpoints={"weights": str(given.model / "new.safetensors")})
    around = given.out / ".." / given.model.name
    (given.out / "link").symlink_to(given.model)
    for folder in (around, given.out / "link"):
        with pytest.raises(
            InvalidInput, match=r"got weights .* in the folder that the model comes from, expected anoth"
        ):
            given.config(checkpoints={"weights": str(folder / pretrained_folder.ONE_FILE)})
    with pytest.raises(
        InvalidInput, match=r"got weights .*final.safetensors of a model of transformers, expected the na"
    ):
        given.config(checkpoints={"weights": str(given.out / "final.safetensors")})
    with pytest.raises(
        InvalidInput, match=r"model: got initial x\.safetensors and weights in .*, expected one of them"
    ):
        check_config(given.config(model={"initial": "x.safetensors"}), 1)
    with pytest.raises(InvalidInput, match=r"model.pretrained.dtype: got 'int8', expected one of float32, bfloat16"):
        given.config(model={"pretrained": {"folder": "x", "dtype": "int8"}})


def test_a_library_that_is_not_there_is_named_with_its_extra(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    given.row()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RuntimeMissing) as caught:
        launch(given.config(), 1, given.out / "job")
    assert str(caught.value) == "model: transformers is not installed here; pip install 'fanin[transformers]'"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ("pp=2,tp=2", {"tie_word_embeddings": True}),
        ("dp_shard=2,tp=2", {"max_shard_size": "6KB"}),
        ("dp_replicate=2,dp_shard=2", {"tie_word_embeddings": True, "max_shard_size": "6KB"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_folder_on_a_mesh_is_the_folder_in_one_process(given: Given, mesh: str, settings: dict[str, object]) -> None:
    given.write(**settings)
    found = []
    for shape in (MeshShape(), MeshShape.parse(mesh)):
        out = given.out / str(shape)
        out.mkdir()
        config = given.config(
            model={"pretrained": {"folder": str(given.model), "dtype": "float64"}},
            training={"batch_size": 4},
            checkpoints={"weights": str(out / "model.safetensors")},
        )
        parallel = ParallelSettings(mesh=shape, microbatches=2 if shape.pp > 1 else 1)
        result = launch(replace(config, parallel=parallel), shape.num_ranks, out / "job")
        found.append((result.metrics.trained.losses, load_file(out / "model.safetensors")))
    (alone, values), (together, others) = found
    assert np.abs(np.array(alone) - np.array(together)).max() < 1e-10
    assert set(values) == set(others)
    assert max(float((values[name] - others[name]).abs().max()) for name in values) < 1e-10
