"""The parameters of Versions in a simulation: in ``on_version`` as they are published, and in the result."""

import numpy as np
import pytest
import torch
from support.digits_fedavg import NUM_CLIENTS, PLAN, app_of, clients_of, network

from fanin.edge.tensors import encode_parameters, sha256_hex
from fanin.protos.errors import InvalidInput
from fanin.simulation import KeptVersion, RunStopped, SimulationSettings, load_data, simulate

ROUNDS = 3


def test_each_version_has_the_parameters_of_its_digest() -> None:
    seen: list[KeptVersion] = []
    settings = SimulationSettings(
        test=load_data("digits").test, plan=PLAN, on_version=seen.append, keep_versions=2, quiet=True
    )
    result = simulate(app_of(network()), clients_of(), cohort=NUM_CLIENTS, rounds=ROUNDS, settings=settings)
    digests = [sha256_hex(encode_parameters(each.table, each.parameters)) for each in seen]
    assert tuple(digests) == result.digests and len(digests) == ROUNDS + 1
    assert [each.row for each in seen] == list(result.rounds)
    assert list(result.versions) == [2, 3]
    for number, version in result.versions.items():
        assert np.array_equal(version.parameters, seen[number].parameters) and version.row == result.rounds[number]
    for name, value in result.module.state_dict().items():
        torch.testing.assert_close(seen[-1].module.state_dict()[name], value, rtol=0.0, atol=0.0)
        assert np.array_equal(result.versions[3].arrays[name], value.numpy())
    for name, value in network().state_dict().items():
        assert torch.equal(seen[0].module.state_dict()[name], value), "the initial model"


def test_an_error_of_on_version_ends_the_simulation_and_keeps_its_rounds() -> None:
    def stop(version: KeptVersion) -> None:
        if version.row.round == 1:
            raise ZeroDivisionError("mine")

    settings = SimulationSettings(plan=PLAN, on_version=stop, quiet=True)
    with pytest.raises(RunStopped, match="ZeroDivisionError: mine") as error:
        simulate(app_of(network()), clients_of(), cohort=2, rounds=ROUNDS, settings=settings)
    assert [row.round for row in error.value.result.rounds] == [0, 1]
    with pytest.raises(InvalidInput, match="keep_versions: got 0"):
        simulate(app_of(network()), clients_of(), cohort=2, rounds=1, settings=SimulationSettings(keep_versions=0))
