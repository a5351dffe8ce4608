"""Models of ``transformers`` that a pipeline or tp would turn into another function are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fanin.datacenter.config.train_config import TrainConfig, check_config, parse_config
from fanin.datacenter.jobs.launch import launch
from fanin.datacenter.models.pretrained import module_of
from fanin.datacenter.models.pretrained_folder import CONFIG
from fanin.datacenter.parallel.layout import Layout
from fanin.datacenter.parallel.pipelines.schedules import Pipeline
from fanin.datacenter.parallel.pipelines.stages import split
from fanin.datacenter.parallel.settings import ParallelSettings
from fanin.datacenter.parallel.transformers_layout import pretrained_layout, pretrained_model
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.protos.errors import UnsupportedModel

ROW: dict[str, object] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MULTIPLIED = {"model_type": "granite", "embedding_multiplier": 2.0, "logits_scaling": 4.0}
EXPERTS = {
    "model_type": "qwen2_moe",
    "num_experts": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}


def job(folder: Path, row: dict[str, object], mesh: MeshShape) -> TrainConfig:
    """Return a job on a model with this config. Its data files do not exist."""
    (folder / CONFIG).write_text(json.dumps(ROW | row))
    text = f"""
        model.pretrained = {{ folder = "{folder}" }}
        data = {{ tokens = "tokens.npy", length = 8 }}
        training = {{ batch_size = 2, learning_rate = 0.01 }}
        stop = {{ steps = 1 }}
    """
    return replace(parse_config(text, "here"), parallel=ParallelSettings(mesh=mesh, microbatches=mesh.pp))


def stage_difference(row: dict[str, object]) -> tuple[Layout, float]:
    """Return a model's layout, and the difference between the model and its two stages in sequence."""
    model = pretrained_model(module_of(ROW | row, "float32", 0, "here"))
    for value in model.module.parameters():
        # The values are large enough that the effect of a soft cap is visible.
        value.data.mul_(20.0)
    tokens = torch.arange(10).reshape(2, 5)
    pipeline = Pipeline(schedule="1F1B", num_ranks=2, stages_per_rank=1, microbatches=2)
    with torch.no_grad():
        expected = model.module(tokens)
        (first,), (last,) = (split(model.module, model.layout, pipeline, rank, ()) for rank in range(2))
        return model.layout, float((last.part(first.part(tokens)) - expected).abs().max())


@pytest.mark.parametrize("kind", ["llama", "gemma", "olmo", "starcoder2", "granite"])
def test_a_model_of_plain_stages_is_the_same_in_two_stages(kind: str) -> None:
    layout, distance = stage_difference({"model_type": kind, "use_cache": True})
    assert distance == 0.0
    assert dict(layout.unfit) == {}


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_the_models_type_makes_no_difference(dtype: str) -> None:
    axes = [
        set(pretrained_layout(module_of(ROW | row, dtype, None, "here")).unfit)
        for row in ({"model_type": "llama"}, {"model_type": "vaultgemma"}, EXPERTS)
    ]
    assert axes == [set(), {"pp"}, {"tp"}]


@pytest.mark.parametrize(
    "row",
    [{"model_type": "cohere"}, {"model_type": "gemma2"}, {"model_type": "nanochat"}, MULTIPLIED],
    ids=lambda row: row["model_type"],
)
def test_a_model_that_a_pipeline_would_change_is_refused_before_a_process_starts(
    tmp_path: Path, row: dict[str, object]
) -> None:
    _, distance = stage_difference(row)
    assert distance > 0.0
    with pytest.raises(UnsupportedModel, match="FN-1269"):
        launch(job(tmp_path, row, MeshShape(pp=2)), 2, tmp_path / "job")
    assert not (tmp_path / "job").exists()
    check_config(job(tmp_path, row, MeshShape(tp=2)), 2)


def test_a_model_that_tp_cannot_split_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    message = (
        r"^mesh tp=2: got tp 2 for Qwen2MoeForCausalLM, whose plan does not say how model.layers.0.mlp.\S* is split"
    )
    with pytest.raises(UnsupportedModel, match=message):
        check_config(job(tmp_path, EXPERTS, MeshShape(tp=2)), 2)
    check_config(job(tmp_path, EXPERTS, MeshShape(dp_shard=2)), 2)
