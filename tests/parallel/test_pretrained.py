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
from fanin.datacenter.jobs.job import train_rank
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
def workspace(tmp_path: Path, library: ModuleType) -> "Workspace":
    return Workspace(tmp_path, library)


class Workspace:
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
        shard_size = settings.pop("max_shard_size", "1GB")
        dtype = str(settings.pop("dtype", "float32"))
        model = pretrained.module_of(ROW | settings, dtype, 3, "here")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(self.model, max_shard_size=shard_size)
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
    ids = torch.from_numpy(tokens.astype(np.int64))
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, LENGTH):
            inputs, targets = ids[start : start + LENGTH], ids[start + 1 : start + LENGTH + 1]
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
def test_a_folder_is_trained_and_written_as_a_folder(
    workspace: Workspace, settings: dict[str, object], num_files: int
) -> None:
    workspace.write(**settings)
    assert len(list(workspace.model.glob("*.safetensors"))) >= num_files
    weights = workspace.out / "model.safetensors"
    result = train_rank(workspace.config(checkpoints={"weights": str(weights)}))
    train_tokens, held_tokens = np.split(workspace.tokens, [NUM_WINDOWS * LENGTH])
    # Each batch has all windows, so the first loss is that of the initial model.
    with torch.no_grad():
        initial_model = workspace.read(workspace.model).float()
    assert result.metrics.trained.losses[0] == pytest.approx(loss_of(initial_model, train_tokens), abs=1e-5)
    assert result.metrics.trained.losses[-1] < result.metrics.trained.losses[0] - 0.1
    trained_model = workspace.read(workspace.out)
    assert trained_model.dtype == torch.float32
    assert (trained_model.lm_head.weight is trained_model.model.embed_tokens.weight) == settings["tie_word_embeddings"]
    assert result.metrics.trained.evaluated[-1].validation_loss == pytest.approx(
        loss_of(trained_model, held_tokens), abs=1e-5
    )
    assert set(load_file(weights)) == {name for name, _ in trained_model.named_parameters()}


def test_a_config_alone_begins_from_the_seed(workspace: Workspace) -> None:
    workspace.row()
    before = torch.random.get_rng_state()
    first, second, third = (build_job_model(replace(workspace.config(), seed=seed)).model.module for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before), "torch's own generator is left as it was"
    values = [dict(module.named_parameters()) for module in (first, second, third)]
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
    assert any(not torch.equal(values[0][name], values[2][name]) for name in values[0])
    assert {value.dtype for value in values[0].values()} == {torch.float32}


def test_extra_tensors_of_older_versions_are_ignored(workspace: Workspace) -> None:
    workspace.write(tie_word_embeddings=True)
    path = workspace.model / "model.safetensors"
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2), "lm_head.weight": torch.zeros(2)}
    expected = train_rank(workspace.config()).metrics.trained.losses
    save_file(load_file(path) | extra, path, {"format": "pt"})
    assert train_rank(workspace.config()).metrics.trained.losses == expected


def test_no_code_of_the_folder_runs(workspace: Workspace, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    workspace.row(
        auto_map={"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}, attn_implementation="a/kernel"
    )
    (workspace.model / "mine.py").write_text(
        f"from pathlib import Path\nPath({str(marker)!r}).touch()\nclass Mine: pass\n"
    )
    assert len(train_rank(workspace.config()).metrics.trained.losses) == 3
    workspace.row(model_type="mine", auto_map={"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"})
    with pytest.raises(InvalidInput, match="FN-1217"):
        check_config(workspace.config(), 1)
    assert not marker.exists()


def _no_config(workspace: Workspace) -> None:
    (workspace.model / "config.json").unlink()


def _not_json(workspace: Workspace) -> None:
    (workspace.model / "config.json").write_text("{")


def _a_list(workspace: Workspace) -> None:
    (workspace.model / "config.json").write_text("[]")


def _a_pickle(workspace: Workspace) -> None:
    (workspace.model / "model.safetensors").unlink()
    (workspace.model / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def _other_names(workspace: Workspace) -> None:
    (workspace.model / "model.safetensors").rename(workspace.model / "consolidated.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
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
        (
            lambda workspace: workspace.row(quantization_config={}),
            "config.json: got a quantized model, expected one whose",
        ),
        (
            lambda workspace: workspace.row(model_type=["llama"]),
            "got model_type ['llama'], expected one that transformers",
        ),
        (
            lambda workspace: workspace.row(model_type="t5"),
            "got model_type 't5', expected a causal or a masked language model",
        ),
        (
            lambda workspace: workspace.row(hidden_size="x"),
            "transformers cannot build this model (StrictDataclassFieldVal",
        ),
        (
            lambda workspace: workspace.row(num_hidden_layers=-1),
            "cannot build this model (ValueError: got num_hidden_layers ",
        ),
        (lambda workspace: workspace.row(num_attention_heads=0), "cannot build this model (ZeroDivisionError"),
        (lambda workspace: workspace.row(hidden_act="nope"), "cannot build this model (KeyError: 'nope')"),
    ],
    ids=lambda value: "" if callable(value) else value[:24].replace(" ", "-"),
)
def test_an_invalid_folder_is_refused_before_a_process_starts(
    workspace: Workspace, damage: Callable[[Workspace], None], message: str
) -> None:
    workspace.write()
    damage(workspace)
    with pytest.raises(InvalidInput) as excinfo:
        launch(workspace.config(), 1, workspace.out / "job")
    assert message in str(excinfo.value)
    assert not (workspace.out / "job").exists()


def test_a_mesh_that_does_not_fit_the_model_is_refused_before_a_process_starts(workspace: Workspace) -> None:
    workspace.row()
    config = replace(workspace.config(), parallel=ParallelSettings(mesh=MeshShape(tp=4)))
    with pytest.raises(InvalidInput, match="FN-1267"):
        launch(config, 4, workspace.out / "job")


@pytest.mark.parametrize("plan", [{"layers.*.self_attn.q_proj": [1]}, {"layers.*.self_attn.q_proj": "rowwise"}])
def test_a_plan_in_the_folder_does_not_replace_the_librarys(workspace: Workspace, plan: dict[str, object]) -> None:
    workspace.row()
    layout = workspace.config().model.parallel_layout
    workspace.row(base_model_tp_plan=plan, base_model_pp_plan=plan)
    assert workspace.config().model.parallel_layout == layout
    assert "model.layers.*.self_attn.k_proj" in layout.plan


def test_the_folder_is_read_once(workspace: Workspace) -> None:
    workspace.row(bos_token_id=5, torch_dtype="float16")
    job_model = build_job_model(workspace.config())
    shutil.rmtree(workspace.model)
    assert job_model.files.exported is not None
    assert json.loads(job_model.files.exported) == ROW | {"bos_token_id": 5, "dtype": "float32"}


def _index_edit(change: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / pretrained_folder.INDEX
        row = json.loads(path.read_text())
        change(row["weight_map"])
        path.write_text(json.dumps(row))

    return edit


def _outside_name(rows: dict[str, str]) -> None:
    rows["model.norm.weight"] = "../model.safetensors"


def _invalid_name(rows: dict[str, str]) -> None:
    rows["model.norm.weight"] = "\ud800.safetensors"


def _swapped_name(rows: dict[str, str]) -> None:
    rows["model.norm.weight"] = next(each for each in rows.values() if each != rows["model.norm.weight"])


def _missing_shard(folder: Path) -> None:
    max(folder.glob("*.safetensors")).unlink()


def _no_map(folder: Path) -> None:
    (folder / pretrained_folder.INDEX).write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            _index_edit(_outside_name),
            "got a tensor in '../model.safetensors', expected the name of a .safetensors file in its folder",
        ),
        (_index_edit(_swapped_name), "tensors: 1 missing, such as model.norm"),
        (_index_edit(_invalid_name), "not a complete safetensors file ('utf-8' codec can't encode"),
        (_index_edit(dict.clear), "got no weight_map, expected one from names of tensors to names of files"),
        (_no_map, "got no weight_map"),
        (_missing_shard, "not a complete safetensors file (No such file"),
        (lambda folder: shutil.copy(folder / "config.json", folder / pretrained_folder.INDEX), "got no weight_map"),
        (lambda folder: (folder / pretrained_folder.INDEX).write_text("{"), "not JSON ("),
    ],
)
def test_weights_in_several_files_are_checked_against_their_index(
    workspace: Workspace, damage: Callable[[Path], None], message: str
) -> None:
    workspace.write(max_shard_size="6KB")
    damage(workspace.model)
    with pytest.raises(InvalidInput) as excinfo:
        train_rank(workspace.config())
    assert str(excinfo.value).startswith(f"{workspace.model / pretrained_folder.INDEX}: ")
    assert message in str(excinfo.value)


def test_another_models_weights_and_too_many_tokens_are_refused(workspace: Workspace) -> None:
    workspace.write()
    workspace.row(intermediate_size=32)
    with pytest.raises(InvalidInput, match="FN-1315"):
        train_rank(workspace.config())
    workspace.row(vocab_size=9)
    with pytest.raises(InvalidInput, match="FN-1233"):
        train_rank(workspace.config())


def test_conflicting_settings_are_refused(workspace: Workspace) -> None:
    workspace.write()
    with pytest.raises(InvalidInput, match="FN-1223"):
        workspace.config(checkpoints={"weights": str(workspace.model / "new.safetensors")})
    indirect_path = workspace.out / ".." / workspace.model.name
    (workspace.out / "link").symlink_to(workspace.model)
    for folder in (indirect_path, workspace.out / "link"):
        with pytest.raises(InvalidInput, match="FN-1223"):
            workspace.config(checkpoints={"weights": str(folder / pretrained_folder.ONE_FILE)})
    with pytest.raises(InvalidInput, match="FN-1223"):
        workspace.config(checkpoints={"weights": str(workspace.out / "final.safetensors")})
    with pytest.raises(InvalidInput, match="FN-1224"):
        check_config(workspace.config(model={"initial": "x.safetensors"}), 1)
    with pytest.raises(InvalidInput, match="FN-1206"):
        workspace.config(model={"pretrained": {"folder": "x", "dtype": "int8"}})


def test_a_missing_library_is_named_with_its_extra(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace.row()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RuntimeMissing) as excinfo:
        launch(workspace.config(), 1, workspace.out / "job")
    assert str(excinfo.value) == "model: transformers is not installed here; pip install 'fanin[transformers]'"


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
def test_a_folder_on_a_mesh_is_the_folder_in_one_process(
    workspace: Workspace, mesh: str, settings: dict[str, object]
) -> None:
    workspace.write(**settings)
    results = []
    for shape in (MeshShape(), MeshShape.parse(mesh)):
        out = workspace.out / str(shape)
        out.mkdir()
        config = workspace.config(
            model={"pretrained": {"folder": str(workspace.model), "dtype": "float64"}},
            training={"batch_size": 4},
            checkpoints={"weights": str(out / "model.safetensors")},
        )
        parallel = ParallelSettings(mesh=shape, microbatches=2 if shape.pp > 1 else 1)
        result = launch(replace(config, parallel=parallel), shape.num_ranks, out / "job")
        results.append((result.metrics.trained.losses, load_file(out / "model.safetensors")))
    (reference, expected), (losses, actual) = results
    assert np.abs(np.array(reference) - np.array(losses)).max() < 1e-10
    assert set(expected) == set(actual)
    assert max(float((expected[name] - actual[name]).abs().max()) for name in expected) < 1e-10
