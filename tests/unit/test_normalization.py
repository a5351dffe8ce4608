"""The layer that normalizes an input by the statistics of a fleet."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.queries import versions_of

from fanin.edge.queries import FeatureGroup, StatisticsQuery, statistics_of
from fanin.protos.errors import InvalidInput

pytestmark = pytest.mark.heavy


def file_of(path: Path, by: str, names: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Write the statistics of five devices, and return all their examples."""
    rng = np.random.default_rng(1)
    fleet = [{"x": rng.integers(0, 9, (40, *shape)).astype(np.float32)} for _ in range(5)]
    for examples in fleet:
        examples["x"][:, 0] = 3.0
    group = FeatureGroup(input="x", names=names, by=by, low=0.0, high=8.0, step=1.0, bins=3)
    query = StatisticsQuery(groups=(group,), num_devices=5)
    features = statistics_of(query, versions_of(query, fleet)[-1])
    path.write_text(json.dumps({"features": [feature.row() for feature in features]}))
    return np.concatenate([examples["x"] for examples in fleet])


@pytest.mark.parametrize(
    ("by", "num", "axes"),
    [("element", 12, (0,)), ("channel", 2, (0, 2, 3)), ("column", 3, (0, 1, 2)), ("all", 1, None)],
)
def test_each_feature_has_mean_0_and_deviation_1(
    tmp_path: Path, by: str, num: int, axes: tuple[int, ...] | None
) -> None:
    import torch

    from fanin.edge.export import normalization

    x = file_of(tmp_path / "statistics.json", by, tuple(map(str, range(num))), (2, 2, 3))
    y = normalization(tmp_path / "statistics.json")(torch.from_numpy(x)).numpy().astype(np.float64)
    varies = x.std(axes) > 0
    np.testing.assert_allclose(y.mean(axes), 0.0, atol=1e-6)
    np.testing.assert_allclose(np.asarray(y.std(axes))[varies], 1.0, rtol=1e-5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"features": []}',
        '{"features": [{"input": "z", "name": "a", "by": "all", "mean": 0.0, "std": 1.0}]}',
        '{"features": [{"input": "x", "name": "a", "by": "all", "mean": null, "std": null}]}',
    ],
)
def test_a_file_without_the_means_is_refused(tmp_path: Path, text: str) -> None:
    from fanin.edge.export import normalization

    (tmp_path / "statistics.json").write_text(text)
    with pytest.raises(InvalidInput) as raised:
        normalization(tmp_path / "statistics.json")
    assert raised.value.code == "FN-1868"
