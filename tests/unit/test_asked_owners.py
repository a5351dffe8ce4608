"""What an owner decides about statistics: the floor against the query of a verified manifest, and what is shown."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.values import assignment

from fanin.clients.device.policy.guard import PrivacyGuard
from fanin.clients.device.policy.owner import write_policy
from fanin.clients.device.site.privacy import site_privacy
from fanin.edge.bundles.arrays import write_query
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.floors.floor import PrivacyFloor
from fanin.edge.queries import FeatureGroup, StatisticsQuery
from fanin.protos.errors import InvalidPlan

GROUP = FeatureGroup(input="x", names=("age",), low=0.0, high=120.0, step=1.0, bins=12, quantiles=(0.5,))
QUERY = StatisticsQuery(groups=(GROUP,), min_devices=5, num_devices=20)


@pytest.mark.parametrize(
    ("floor", "is_refused"),
    [
        (PrivacyFloor(), False),
        (PrivacyFloor(min_cell_devices=5), False),
        (PrivacyFloor(min_cell_devices=6), True),
        (PrivacyFloor(statistics="refuse"), True),
        (PrivacyFloor(protocol="secagg"), True),
        (PrivacyFloor(mechanism="central"), True),
    ],
)
def test_an_owner_refuses_a_query_before_any_download(tmp_path: Path, floor: PrivacyFloor, is_refused: bool) -> None:
    manifest = write_query(QUERY, tmp_path / "bundle", SigningKey(bytes(32)), "ages").manifest
    write_policy(tmp_path, floor)
    guard, work = PrivacyGuard(tmp_path), replace(assignment(1), run_id="ages")
    if is_refused:
        with pytest.raises(InvalidPlan) as raised:
            guard.check_manifest(work, manifest)
        assert raised.value.code == "FN-1700"
    else:
        guard.check_manifest(work, manifest)
    texts = list(site_privacy(tmp_path).ledger_texts())
    assert texts[0].startswith("run ages: asks for statistics of the examples: 1 of x (all): counts, sums and squares")
    assert any("refused 1 assignment" in text for text in texts) == is_refused


def test_a_floor_about_statistics_lets_a_model_train(tmp_path: Path) -> None:
    from fanin.simulation import synthetic_bundle

    write_policy(tmp_path, PrivacyFloor(statistics="refuse", min_cell_devices=9))
    manifest = synthetic_bundle(tmp_path / "bundle", SigningKey(bytes(32)), {"a": (2,)}).manifest
    PrivacyGuard(tmp_path).check_manifest(assignment(1), manifest)
