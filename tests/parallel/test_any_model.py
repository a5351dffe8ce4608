"""Any language model that ``transformers`` can build trains with data parallelism, as torch alone trains it."""

import copy
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from parallel.cells import LENGTH, VOCABULARY, Cell
from parallel.families import UNPLANNED, batches, pretrained_row
from torch import nn
from torch.nn.functional import cross_entropy

from fanin.datacenter.config.train_config import TrainConfig, check_config, parse_config
from fanin.datacenter.jobs.job import train_rank
from fanin.datacenter.models.pretrained import module_of
from fanin.datacenter.models.pretrained_folder import CONFIG
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.draws.recording import find_draws
from fanin.datacenter.parallel.engine import build_engine
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.parallel.transformers_layout import pretrained_layout, pretrained_model
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.protos.errors import InvalidInput, UnsupportedModel

LAYERS = {
    "qwen3": "model.layers",
    "phi3": "model.layers",
    "mixtral": "model.layers",
    "gpt_neox": "gpt_neox.layers",
    "gpt2": "transformer.h",
    "opt": "model.decoder.layers",
    "bert": "bert.encoder.layer",
}
# The library loads a model's code at first use, which takes a second for each.
IN_CI = ("gpt2", "mixtral", "bert")
FAMILIES = [family if family in IN_CI else pytest.param(family, marks=pytest.mark.nightly) for family in UNPLANNED]


def row_of(family: str) -> dict[str, object]:
    return dict(pretrained_row(Cell(mesh="none", family=family)))


def job(folder: Path, **tables: dict[str, object]) -> TrainConfig:
    """Return a job on the model of a folder, with tokens in the parent folder."""
    tokens = folder.parent / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(0, VOCABULARY - 1, 9 * LENGTH, np.uint16))
    text = f"""
        model.pretrained = {{ folder = "{folder}" }}
        data = {{ tokens = "{tokens}", length = {LENGTH}, held_fraction = 0.25 }}
        training = {{ batch_size = 6, learning_rate = 0.01 }}
        stop = {{ steps = 2 }}
    """
    return parse_config(text, "here", tables)


def folder_of(parent: Path, family: str, **changes: object) -> Path:
    """Create a folder with only a config."""
    folder = parent / "model"
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(row_of(family) | changes))
    return folder


def save(model: nn.Module, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)  # type: ignore[operator]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_that_of_transformers_and_torch(family: str) -> None:
    module = module_of(row_of(family), "float64", 1, "here")
    reference = copy.deepcopy(module).train()
    before = {name: value.detach().clone() for name, value in reference.named_parameters()}
    inputs, targets = next(batches(1))
    loss = cross_entropy(reference(inputs).logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TOKEN)
    loss.backward()
    training = TrainingSettings(batch_size=len(inputs), learning_rate=1.0, optimizer="sgd", momentum=0.0)
    model, batch = pretrained_model(module), Batch(inputs=inputs, targets=targets)
    # OPT draws the number of LayerDrop at any chance.
    model = replace(model, draws=find_draws(module, model.objective, batch))
    engine = build_engine(model, ParallelSettings(), training, None, torch.device("cpu"))
    result = engine.step(batch)
    assert float(result.loss) == pytest.approx(float(loss.detach()), abs=1e-12)
    after = engine.full_parameters()
    gradients = {name: value.grad for name, value in reference.named_parameters()}
    assert set(after) == set(gradients)
    assert any(gradient is not None and float(gradient.abs().max()) > 1e-3 for gradient in gradients.values())
    for name, gradient in gradients.items():
        expected = torch.zeros_like(before[name]) if gradient is None else gradient
        assert float((before[name] - after[name] - expected).abs().max()) < 1e-12, name


@pytest.mark.parametrize("family", FAMILIES)
def test_fsdp_wraps_each_layer_and_tp_names_the_missing_plan(tmp_path: Path, family: str) -> None:
    layout = pretrained_layout(module_of(row_of(family), "float32", None, "here"))
    assert (layout.layers, layout.sizes.num_layers) == (LAYERS[family], 2)
    config = job(folder_of(tmp_path, family))
    for mesh in (MeshShape(), MeshShape(dp_shard=2), MeshShape(dp_replicate=2)):
        check_config(replace(config, parallel=ParallelSettings(mesh=mesh)), mesh.num_ranks)
    errors = {
        "qwen3": r"Qwen3ForCausalLM, whose plan splits model.layers.\*.self_attn.q_norm 'replicated_with_grad_",
        "phi3": r"Phi3ForCausalLM, whose plan splits model.layers.\*.self_attn.o_proj 'rowwise_split_input'",
        "mixtral": r"MixtralForCausalLM, whose plan splits model.layers.\*.mlp.experts.gate_up_proj 'packed_colwise'",
        "gpt_neox": "GPTNeoXForCausalLM, which has no module gpt_neox.embed_tokens, gpt_neox.norm,",
        "gpt2": r"GPT2LMHeadModel, which has no plan for tensor parallelism \(base_model_tp_plan\)",
        "opt": "OPTForCausalLM, which has no plan for tensor parallelism",
        "bert": "BertForMaskedLM, which has no plan for tensor parallelism",
    }
    tp_config = replace(config, parallel=ParallelSettings(mesh=MeshShape(tp=2)))
    with pytest.raises(UnsupportedModel, match=f"^mesh tp=2: got tp 2 for {errors[family]}.*; use pp 1 and tp 1, and"):
        check_config(tp_config, 2)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_pipeline_names_the_modules_that_it_needs(tmp_path: Path, family: str) -> None:
    config = job(folder_of(tmp_path, family))
    pp_config = replace(config, parallel=ParallelSettings(mesh=MeshShape(pp=2), microbatches=2))
    with pytest.raises(UnsupportedModel, match="FN-1269"):
        check_config(pp_config, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_trained_and_opened_again(tmp_path: Path, family: str) -> None:
    folder = folder_of(tmp_path, family)
    # The files of GPT-NeoX and Mixtral use the names of an older release.
    model = module_of(row_of(family), "float32", 3, "here")
    save(model, folder)
    out = tmp_path / "out"
    out.mkdir()
    mask_tables = {"data": {"mask_token": VOCABULARY - 1}} if family == "bert" else {}
    config = job(folder, checkpoints={"weights": str(out / "model.safetensors")}, **mask_tables)
    losses = train_rank(config).metrics.trained.losses
    assert np.isfinite(losses).all()
    library = sys.modules["transformers"]
    head = library.AutoModelForMaskedLM if family == "bert" else library.AutoModelForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        initial_model, trained_model = head.from_pretrained(folder), head.from_pretrained(out)
    before, after = (
        {name: value.detach() for name, value in each.named_parameters()} for each in (initial_model, trained_model)
    )
    assert set(before) == set(after)
    # Two steps of AdamW at this rate move no value by more than a few hundredths.
    assert max(float((before[name] - after[name]).abs().max()) for name in before) < 0.05
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_a_masked_model_with_weights_needs_its_mask(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "bert")
    assert len(train_rank(job(folder)).metrics.trained.losses) == 2
    save(module_of(row_of("bert"), "float32", 3, "here"), folder)
    with pytest.raises(InvalidInput, match="FN-1237"):
        check_config(job(folder), 1)
    with pytest.raises(InvalidInput, match=f"got {VOCABULARY + 1} tokens, expected at most the model's {VOCABULARY}"):
        train_rank(job(folder, data={"mask_token": VOCABULARY}))


def test_a_decoder_of_berts_kind_is_causal_and_refuses_a_mask(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "bert", is_decoder=True)
    assert len(train_rank(job(folder)).metrics.trained.losses) == 2
    with pytest.raises(InvalidInput, match="FN-1237"):
        check_config(job(folder, data={"mask_token": 5}), 1)


@pytest.mark.parametrize("family", ["gpt2", "bert", pytest.param("opt", marks=pytest.mark.nightly)])
def test_windows_longer_than_a_table_of_positions_are_refused(tmp_path: Path, family: str) -> None:
    folder = folder_of(tmp_path, family)
    with pytest.raises(InvalidInput, match=f"got length 9, expected at most the model's {LENGTH} positions"):
        check_config(job(folder, data={"length": LENGTH + 1}), 1)


def test_a_kind_without_a_language_model_head_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="FN-1217"):
        module_of({"model_type": "t5"}, "float32", None, "here")
