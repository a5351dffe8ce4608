"""Models of ``transformers`` with ids and an attention mask, and modules with its outputs, against eager torch."""

import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from support.models import export_bundle
from support.nightly import in_ci

from fanin.edge.export import App
from fanin.edge.export.formats.graphs import FORMATS
from fanin.edge.export.module.prepare import prepare
from fanin.edge.export.verification.ready import check_kept
from fanin.edge.runtimes.available import open_runtime
from fanin.protos.errors import UnsupportedModel

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def library() -> ModuleType:
    """The module ``transformers``."""
    import transformers

    return sys.modules[transformers.__name__]


class Classifier(torch.nn.Module):
    """A bag of words that returns a ModelOutput, as the models of transformers do."""

    def __init__(self, output: type) -> None:
        super().__init__()
        self.table, self.head, self.output = torch.nn.Embedding(NUM_TOKENS, 8), torch.nn.Linear(8, 3), output

    def forward(self, input_ids: torch.Tensor) -> object:
        """Return the logits (B, 3) and the states that they are computed from."""
        states = self.table(input_ids)
        return self.output(logits=self.head(states.mean(1)), hidden_states=(states,))


def test_a_model_output_is_trained_by_its_path() -> None:
    from transformers.modeling_outputs import SequenceClassifierOutput

    torch.manual_seed(0)
    ids = torch.randint(NUM_TOKENS, (32, 4), dtype=torch.int32)
    module = Classifier(SequenceClassifierOutput)
    app = App(name="words", module=module, calibration={"input_ids": ids}, batch_size=4, num_classes=3, output="logits")
    bundle = export_bundle(app)
    logits = open_runtime("onnx").open_predict(bundle, bundle.initial_parameters())({"input_ids": ids.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(logits, module(ids).logits.numpy(), atol=0.1)
    with pytest.raises(UnsupportedModel, match="FN-0738"):
        check_kept(prepare(replace(app, output="")))


@pytest.mark.nightly
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("graph_format", in_ci(FORMATS, ()))
def test_an_encoder_with_an_attention_mask_is_exported(library: ModuleType, attention: str, graph_format: str) -> None:
    config = library.BertConfig(
        **SIZES, vocab_size=NUM_TOKENS, max_position_embeddings=16, num_labels=3, attn_implementation=attention
    )
    torch.manual_seed(0)
    module, rng = library.BertForSequenceClassification(config), np.random.default_rng(0)
    ids = rng.integers(0, NUM_TOKENS, (32, 8)).astype(np.int32)
    mask = (np.arange(8) < rng.integers(2, 9, (32, 1))).astype(np.int32)
    inputs = {"input_ids": ids, "attention_mask": mask}
    app = App(name="bert", module=module, calibration=inputs, batch_size=4, num_classes=3, output="logits")
    bundle = export_bundle(app, [graph_format])
    assert bundle.manifest.num_tokens == {"input_ids": NUM_TOKENS}
    predict = open_runtime(FORMATS[graph_format].runtime).open_predict(bundle, bundle.initial_parameters())
    masked_inputs = inputs | {"input_ids": np.where(mask, ids, 0)}
    np.testing.assert_array_equal(predict(inputs), predict(masked_inputs))
