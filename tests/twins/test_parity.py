"""The reference models in every runtime against eager torch, after twenty steps, in the nightly suite."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PARITY = Path(__file__).parents[2] / "benchmarks" / "parity.py"
TOLERANCE = 1e-5
AMPLIFICATION = 20
"""Limit for models that amplify rounding, as a multiple of the difference of torch in float32 and in float64."""
SMALL = ("mlp", "digits_cnn", "decoder", "gru", "lstm")
MODELS = (*SMALL, "ds_cnn", "resnet8", "mobilenet")
LIMIT_S = 1800
"""Seconds for all models. The first test waits for them."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the report on all models. One command: each start of it imports torch, and starts the runtimes."""
    file = tmp_path_factory.mktemp("parity") / "parity.json"
    subprocess.run([sys.executable, str(PARITY), "--models", ",".join(MODELS), "--json", str(file)], check=True)
    loaded: dict[str, Any] = json.loads(file.read_text())
    return loaded


@pytest.mark.nightly
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("model", MODELS)
def test_twenty_steps_end_where_eager_torch_ends(model: str, report: dict[str, Any]) -> None:
    assert report["max_parameter_movement"][model] > 1e-3
    for runtime, difference in report["max_parameter_difference_in_a_step"][model].items():
        assert difference <= TOLERANCE, f"{model} in {runtime}: {difference:.1e} in a step"
    # The sign of a ReLU's input near zero depends on rounding, also in torch's float32. Later steps amplify it.
    rounding = report["max_parameter_difference_eager_float32_to_float64"][model]
    bound = TOLERANCE if model in SMALL else max(TOLERANCE, AMPLIFICATION * rounding)
    for runtime, difference in report["max_parameter_difference"][model].items():
        assert difference <= bound, f"{model} in {runtime}: {difference:.1e}, torch's float32 itself {rounding:.1e}"
