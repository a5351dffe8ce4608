"""The decoder and the encoder: what each position sees, their rotations, and sizes that make none."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fanin.datacenter.models.decoder import Decoder, DecoderConfig, rotate, rotations
from fanin.datacenter.models.encoder import Encoder, EncoderConfig
from fanin.protos.errors import InvalidInput

CONFIG = DecoderConfig(vocabulary=13, width=16, num_layers=2, num_heads=4, num_kv_heads=2, feed_forward=8)


def test_a_decoder_sees_no_later_tokens() -> None:
    decoder = Decoder(CONFIG, seed=2)
    tokens = torch.arange(10)[None] % 13
    logits = decoder(tokens)
    other_tokens = tokens.clone()
    other_tokens[0, 7:] = 0
    assert torch.allclose(decoder(other_tokens)[:, :7], logits[:, :7], atol=1e-6)
    assert not torch.allclose(decoder(other_tokens)[:, 7:], logits[:, 7:], atol=1e-6)


@given(seed=st.integers(0, 99), shift=st.integers(1, 5))
def test_positions_are_relative(seed: int, shift: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(8, dtype=torch.float64, generator=generator).expand(9, 8) for _ in range(2))
    cos, sin = rotations(query, 100.0)
    scores = rotate(query, cos, sin) @ rotate(key, cos, sin).T
    assert torch.allclose(scores[:-shift, :-shift], scores[shift:, shift:])
    assert not torch.allclose(scores[0, 1:], scores[0, :-1])


def test_a_compiled_layer_computes_its_rotations_once() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    decoder = Decoder(CONFIG, seed=2)
    tokens = torch.arange(10)[None] % 13
    assert torch.equal(torch.compile(decoder, backend=backend, fullgraph=True)(tokens), decoder(tokens))
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert called.count("fanin.rotations.default") == CONFIG.num_layers
    # Inlined, they would be recomputed for each element.
    assert not {"cos", "sin"} & set(called)


def test_an_encoder_sees_both_sides_but_no_padding() -> None:
    encoder = Encoder(EncoderConfig(vocabulary=13, context=8, width=16, num_heads=2, feed_forward=8), seed=1)
    tokens, mask = torch.arange(8)[None], torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    logits = encoder(tokens, mask)
    other_tokens = tokens.clone()
    other_tokens[0, 6:] = 12
    assert torch.allclose(encoder(other_tokens, mask)[:, :6], logits[:, :6], atol=1e-6)
    assert not torch.allclose(encoder(other_tokens)[:, :6], encoder(tokens)[:, :6], atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (DecoderConfig, {"width": 12, "num_heads": 4, "num_kv_heads": 4}),
        (DecoderConfig, {"num_heads": 4, "num_kv_heads": 3}),
        (DecoderConfig, {"num_layers": 0}),
        (EncoderConfig, {"width": 10, "num_heads": 4}),
        (EncoderConfig, {"context": 0}),
    ],
)
def test_sizes_that_make_no_model_are_refused(kind: type, sizes: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="FN-1214"):
        kind(**sizes)
