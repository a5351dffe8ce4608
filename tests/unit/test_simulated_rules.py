"""Each robust rule in a simulation: two seeded Rounds over clients of digits, repeated to the bit."""

from typing import Any

import pytest
from support.digits_fedavg import NUM_CLIENTS, PLAN, app_of, clients_of, network

from fanin.simulation import SimulationSettings, load_data, simulate

OPTIONS: dict[str, dict[str, Any]] = {
    "median": {},
    "meamed": {"f": 1},
    "krum": {"f": 1},
    "multi_krum": {"f": 1, "m": 3},
    "bulyan": {"f": 0},
    "geometric_median": {"iterations": 20},
    "centred_clipping": {"radius": 0.2},
    "norm_bounding": {"radius": 0.2},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIONS)
def test_a_simulation_with_a_robust_rule_repeats_to_the_bit(name: str) -> None:
    rule = {"aggregation.rule": name, "aggregation.rule_options": OPTIONS[name], "cohort.quorum": NUM_CLIENTS}
    plan = PLAN | rule
    settings = SimulationSettings(test=load_data("digits").test, plan=plan, seed=4, quiet=True)
    first, second = (
        simulate(app_of(network()), clients_of(), cohort=NUM_CLIENTS, rounds=2, settings=settings) for _ in range(2)
    )
    assert first.is_complete
    ours, again = first.module.state_dict(), second.module.state_dict()
    assert all((again[name] == value).all() for name, value in ours.items())
    assert all((network().state_dict()[name] != value).any() for name, value in ours.items())
