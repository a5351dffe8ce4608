"""Traced Signatures as one TFLite file."""

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter
from torch import Tensor

from fanin.edge.export.formats.tflite.file import only, pack
from fanin.edge.export.formats.tflite.operators import LATEST, check_operators, check_runs
from fanin.edge.export.formats.tflite.writer import to_tflite
from fanin.edge.export.graph.traced import Traced
from fanin.protos.errors import UnsupportedModel

TABLE = torch.arange(4096, dtype=torch.float32).reshape(64, 64) / 4096


class TwoInputs(torch.nn.Module):
    """A module with two inputs, two outputs and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", TABLE)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return first @ self.table + torch.eye(64), second.sum()


def trace_module(module: torch.nn.Module, examples: tuple[Tensor, ...], outputs: list[str]) -> Traced:
    """Return the module's graph; its inputs are named like parameters."""
    inputs = [f"body.{index}.weight" for index in range(len(examples))]
    return Traced(program=torch.export.export(module, examples), examples=examples, inputs=inputs, outputs=outputs)


@pytest.fixture(scope="module")
def two_signatures() -> bytes:
    """A file with the same module in two Signatures."""
    examples = (torch.ones(64, 64), torch.arange(3, dtype=torch.float32))
    graph = trace_module(TwoInputs(), examples, ["next.body.0.weight", "loss"])
    return to_tflite({"train": graph, "evaluate": graph}, "App small")


def test_ports_have_their_own_names(two_signatures: bytes) -> None:
    interpreter = Interpreter(model_content=two_signatures, num_threads=1)
    ports = {"inputs": ["body.0.weight", "body.1.weight"], "outputs": ["loss", "next.body.0.weight"]}
    assert interpreter.get_signature_list() == {"evaluate": ports, "train": ports}
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    values = {"body.0.weight": x, "body.1.weight": np.array([1, 2, 4], np.float32)}
    for name in ("train", "evaluate"):
        outputs = interpreter.get_signature_runner(name)(**values)
        np.testing.assert_allclose(outputs["next.body.0.weight"], x @ TABLE.numpy() + np.eye(64), rtol=0, atol=1e-4)
        assert outputs["loss"] == 7.0


def test_a_shared_constant_is_stored_once_and_nothing_else_is(two_signatures: bytes) -> None:
    # A matrix product stores its constant transposed.
    assert two_signatures.count(TABLE.numpy().T.tobytes()) == 1
    assert len(two_signatures) < 2 * TABLE.nbytes + 4096
    for word in (b"table", b"MLIR", b"runtime_version", b".py"):
        assert word not in two_signatures, f"the file says {word!r}"


def test_the_same_graphs_give_the_same_bytes(two_signatures: bytes) -> None:
    examples = (torch.ones(64, 64), torch.arange(3, dtype=torch.float32))
    graph = trace_module(TwoInputs(), examples, ["next.body.0.weight", "loss"])
    assert to_tflite({"train": graph, "evaluate": graph}, "App small") == two_signatures


def reference_for_only(data: bytes, signature: str) -> bytes:
    """The slow reference for ``only``: it unpacks the model and changes the copy."""
    model = schema.ModelT.InitFromPackedBuf(data)
    (ports,) = (row for row in model.signatureDefs if row.signatureKey.decode() == signature)
    model.subgraphs, model.signatureDefs = [model.subgraphs[ports.subgraphIndex]], [ports]
    ports.subgraphIndex = 0
    return pack(model)


@pytest.mark.parametrize("signature", ["train", "evaluate"])
def test_one_signature_of_a_model_is_a_file_and_the_model_is_unchanged(two_signatures: bytes, signature: str) -> None:
    model = schema.ModelT.InitFromPackedBuf(two_signatures)
    before = pack(model)
    assert only(model, signature) == reference_for_only(two_signatures, signature)
    assert pack(model) == before


class ScatterSum(torch.nn.Module):
    """A module with an operator that the old runtime lacks."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(8).scatter_reduce(0, x.long(), x, "sum")


def test_an_operator_that_a_runtime_lacks_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="FN-0783"):
        to_tflite({"infer": trace_module(ScatterSum(), (torch.ones(4),), ["logits"])}, "App small")


class Decomposed(torch.nn.Module):
    """A module with an operator that the converter does not know."""

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.operator(x)


@pytest.mark.parametrize(
    ("operator", "name"), [(torch.linalg.eigvalsh, "_linalg_eigh"), (torch.linalg.inv, "linalg_inv_ex")]
)
def test_an_operator_without_any_form_is_refused_without_a_second_attempt(
    operator: Callable[[Tensor], Tensor], name: str
) -> None:
    # The second attempt, in a process of its own, would report the converter's own message.
    with pytest.raises(UnsupportedModel) as excinfo:
        to_tflite({"infer": trace_module(Decomposed(operator), (torch.eye(4),), ["logits"])}, "App small")
    assert str(excinfo.value) == (
        f"App small: cannot be converted to TFLite (no form of aten.{name}.default); replace that part of the model, "
        "or freeze it; fanin export --check names it"
    )


def test_later_versions_of_an_operator_are_refused() -> None:
    check_operators(LATEST.items(), "App small")
    with pytest.raises(UnsupportedModel, match="FN-0783"):
        check_operators([("ADD", 6), ("CUSTOM", 1), ("MUL", 1)], "App small")


CODE = """
import torch
from fanin.edge.export.formats.tflite.writer import to_tflite
from fanin.edge.export.graph.traced import Traced
class Twice(torch.nn.Module):
    def forward(self, x):
        return 2 * x
example = (torch.ones(3),)
found = Traced(program=torch.export.export(Twice(), example), examples=example, inputs=["x"], outputs=["y"])
to_tflite({"infer": found}, "App small")
import sys
print("ours", file=sys.stderr)
"""


@pytest.mark.nightly
def test_the_converter_prints_nothing() -> None:
    completed = subprocess.run(
        [sys.executable, "-W", "default", "-c", CODE], capture_output=True, text=True, check=True, timeout=120
    )
    assert (completed.stdout, completed.stderr) == ("", "ours\n")


@pytest.mark.parametrize("operation", [lambda x: x, lambda x: 2.0 * x.tanh(), lambda x: x.long().clamp(max=2).float()])
def test_an_expansion_that_is_permuted_later(operation: Callable[[Tensor], Tensor]) -> None:
    class Permuted(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return operation(x.unsqueeze(-1).expand(-1, -1, 3)).permute(0, 2, 1).contiguous() + 0.5

    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    data = to_tflite({"infer": trace_module(Permuted(), (x,), ["y"])}, "App permuted")
    output = Interpreter(model_content=data, num_threads=1).get_signature_runner("infer")(
        **{"body.0.weight": x.numpy()}
    )
    np.testing.assert_allclose(output["y"], Permuted()(x).numpy(), rtol=0, atol=1e-6)


def test_an_invalid_graph_of_the_converter_raises_a_fanin_error(two_signatures: bytes) -> None:
    model = schema.ModelT.InitFromPackedBuf(two_signatures)
    for tensor in (
        candidate for graph in model.subgraphs for candidate in graph.tensors if list(candidate.shape) == [64, 64]
    ):
        tensor.shape = np.array([32, 128], np.int32)
        break
    with pytest.raises(UnsupportedModel, match="FN-0784"):
        check_runs(model, "App small")
