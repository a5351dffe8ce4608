"""``fanin privacy ledger`` and ``fanin privacy charge``, with processes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.private import PRIVACY
from support.processes import Site

from fanin.clients.administrator import Administrator
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.errors import Conflict, NotFound
from fanin.protos.messages import CodecSpec, LostInterval, RunState, Training
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, StopPlan
from fanin.simulation import synthetic_bundle

PUBLISHER = SigningKey(bytes(range(32)))
PLAN = Plan(
    name="story",
    cohort=CohortPlan(concurrency=1, buffer=1, quorum=1, deadline_s=120.0),
    training=Training(epochs=1, learning_rate=0.1, seed=5),
    codec=CodecSpec(name="fixed32", max_shift=0),
    aggregation=AggregationPlan(max_examples=1),
    stop=StopPlan(max_rounds=1),
    privacy=PRIVACY,
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A folder for a coordinator and devices."""
    place = Site(tmp_path)
    yield place
    place.close()


def fanin(site: Site, *words: str, status: int = 0) -> str:
    """Run a command and return all that it prints."""
    (site.folder / "publisher.key").write_text(PUBLISHER.private_bytes().hex())
    command = [sys.executable, "-m", "fanin.commands.main", *words]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, cwd=site.folder)
    assert completed.returncode == status, completed.stdout + completed.stderr
    return completed.stdout + completed.stderr


def ledger(site: Site) -> dict[str, object]:
    """Return the ledger of the population."""
    row: dict[str, object] = json.loads(fanin(site, "privacy", "ledger", "phones", "--state", "state", "--json"))
    return row


def begin(site: Site) -> None:
    site.serve()
    site.start_run(PLAN, synthetic_bundle(site.folder / "bundle", PUBLISHER, {"a": (3, 5)}), PUBLISHER)


def test_populations_and_ledgers_are_read_and_charged_over_the_wire(site: Site) -> None:
    begin(site)
    token = (site.state / "tokens" / "operator.token").read_text()
    with Administrator.connect(site.address, site.ca, token) as client:
        (population,) = client.populations()
        assert (population.name, population.epsilon, population.newest) == ("phones", 1.8, None)
        assert client.ledger_page("phones").rows == ()
        with pytest.raises(NotFound) as excinfo:
            client.ledger_page("others")
        assert excinfo.value.code == "FN-1694"
        for _ in range(2):
            charged = client.charge(LostInterval(population="phones", rounds=2, run_id="run"))
        assert client.ledger_page("phones").rows == (charged.newest,)
        with pytest.raises(Conflict) as conflict:
            client.charge(LostInterval(population="phones", rounds=3, run_id="run"))
        assert conflict.value.code == "FN-1692"
    with site.operator() as operator:
        info = operator.run("run")
    assert info.privacy is not None
    assert charged.newest is not None
    assert (info.privacy.epsilon, info.privacy.budget) == (charged.newest.epsilon, 1.8)


@pytest.mark.nightly
def test_a_run_names_the_unit_a_weak_delta_and_charged_populations(site: Site) -> None:
    begin(site)
    fanin(site, "privacy", "charge", "phones", "--rounds", "1", "--run", "run", "--state", "state")
    sets = ("name=story", "bundle=bundle", "cohort.concurrency=1", "cohort.buffer=1", "cohort.quorum=1")
    sets = (*sets, "codec.name=fixed32", "codec.max_shift=0", "aggregation.max_examples=1", "privacy.mechanism=central")
    sets = (*sets, "privacy.clip_norm=0.5", "privacy.noise_multiplier=5.0", "privacy.epsilon=1.8", "privacy.delta=1e-3")
    sets = (*sets, "privacy.population=others", "privacy.population_size=1000")
    sets = (*sets, "training.learning_rate=0.1")
    (site.folder / "plan.toml").write_text("")
    words = [word for each in sets for word in ("--set", each)]
    text = " ".join(fanin(site, "run", "plan.toml", *words, "--run-id", "second", "--state", "state").split())
    assert "the unit of the claim is one device with all its examples" in text
    assert "privacy.delta: 0.001 is weak for a population of 1,000 devices" in text
    assert "others is new here and begins at epsilon 0" in text
    assert "unit: one device" in fanin(site, "describe", "second", "--state", "state")
    assert "claim   zero-out" in fanin(site, "privacy", "ledger", "others", "--state", "state")


@pytest.mark.nightly
def test_an_administrator_charges_a_population_and_anybody_reads_it(site: Site) -> None:
    begin(site)
    assert "phones            0     1.8  1e-06    1,000     0" in fanin(site, "privacy", "ledger", "--state", "state")
    fanin(site, "token", "create", "eva", "--role", "operator", "--out", "eva.token", "--state", "state")
    charge = ("privacy", "charge", "phones", "--rounds", "2", "--run", "run", "--state", "state")
    assert "FN-1416" in fanin(site, *charge, "--token-file", "eva.token", status=1)
    assert "spent   epsilon 1.3" in fanin(site, *charge)
    assert "FN-1694" in fanin(site, "privacy", "ledger", "others", "--state", "state", status=1)
    row = ledger(site)
    assert (row["num_rows"], row["budget"], row["uncharged_runs"]) == (1, 1.8, [])
    assert [(each["round"], each["count"]) for each in row["rows"]] == [(0, 2)]
    assert "lost" in fanin(site, "privacy", "ledger", "phones", "--state", "state")


@pytest.mark.nightly
def test_a_restored_run_continues_after_its_lost_interval_was_charged(site: Site) -> None:
    begin(site)
    site.device(0)
    site.events()
    fanin(site, "backup", "backup", "--state", "state")
    fanin(site, "resume", "run", "--rounds", "1", "--state", "state")
    site.events()
    before = ledger(site)
    assert before["num_rows"] == 2
    site.started[0].kill()
    shutil.rmtree(site.state)
    text = fanin(site, "restore", "backup", "--state", "state")
    assert "fanin privacy charge phones --rounds N" in text
    site.serve()
    fanin(site, "reclaim", "run", "--key", "publisher.key", "--state", "state")
    resume = ("resume", "run", "--rounds", "5", "--state", "state")
    assert "FN-1691" in fanin(site, *resume, status=1)
    assert "waits   lost rounds of run run" in fanin(site, "privacy", "ledger", "phones", "--state", "state")
    fanin(site, "privacy", "charge", "phones", "--rounds", "1", "--state", "state")
    assert ledger(site)["epsilon"] == before["epsilon"]
    assert "ChargePopulation" in fanin(site, "audit", "list", "--state", "state")
    fanin(site, *resume)
    site.events()
    with site.operator() as operator:
        info = operator.run("run")
    assert (info.state, ledger(site)["num_rows"]) == (RunState.FINISHED, 3)
    assert "FN-1660" in info.reason
    assert "epsilon 1.6" in fanin(site, "describe", "run", "--state", "state")
    assert "noised sum" in fanin(site, "verify", "run", "--state", "state")
