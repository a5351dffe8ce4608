"""A Flower app in a private Run: its arrays are clipped like any change, and its metrics stay on the device."""

from pathlib import Path
from typing import Final

import numpy as np
import pytest
from support.flower_apps import MESSAGE_APP, write_app

from fanin.clients import FlowerSettings
from fanin.protos.errors import InvalidPlan
from fanin.simulation import SimulationSettings, simulate

pytestmark = pytest.mark.nightly
CLIP_NORM: Final = 0.25
PLAN: Final = {
    "training.learning_rate": 0.5,
    "aggregation.max_examples": 1,
    "privacy.mechanism": "central",
    "privacy.clip_norm": CLIP_NORM,
    "privacy.noise_multiplier": 0.4,
    "privacy.epsilon": 100.0,
    "privacy.delta": 1e-2,
    "privacy.population": "clients",
    "privacy.population_size": 3,
}
INITIAL: Final = {"layer.weight": np.zeros((2, 3), np.float32), "layer.bias": np.ones(2, np.float32)}
APP: Final = MESSAGE_APP.replace('    arrays["norm.num_batches_tracked"] += 1\n', "")


@pytest.fixture
def app(tmp_path: Path) -> FlowerSettings:
    folder = write_app(tmp_path / "app", "private_message_app", APP)
    return FlowerSettings(app="private_message_app:app", folder=folder, run_config="scale=8.0")


def test_the_arrays_of_a_flower_app_are_clipped_and_its_metrics_are_not_sent(app: FlowerSettings) -> None:
    settings = SimulationSettings(initial=INITIAL, plan=PLAN, quiet=True)
    result = simulate(app, 3, cohort=3, rounds=1, settings=settings)
    assert result.failures == ()
    assert result.rounds[-1].statistics == {}
    arrays = result.arrays
    change = np.concatenate([(arrays[name] - INITIAL[name]).ravel() for name in INITIAL])
    # Without clipping, the app moves the weights by 4 and more. Each value of the mean has noise of 0.4 / 3 clip norms.
    assert 0 < np.linalg.norm(change) < CLIP_NORM * (1 + 0.4 / 3 * 2 * change.size**0.5)


def test_a_flower_app_with_a_counter_is_refused(app: FlowerSettings) -> None:
    initial = {**INITIAL, "norm.num_batches_tracked": np.array(3, np.int64)}
    with pytest.raises(InvalidPlan) as excinfo:
        simulate(app, 3, cohort=3, rounds=1, settings=SimulationSettings(initial=initial, plan=PLAN, quiet=True))
    assert excinfo.value.code == "FN-1684"
