"""The seeds of the generators that a Flower app draws from, and the mods that its device warns of."""

import random
import subprocess
import sys
from collections.abc import Callable

import flwr.client.mod
import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from flwr.client.mod import LocalDpMod, fixedclipping_mod, secagg_mod, secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from support.errors import raises

from fanin.clients.flower.generators import seeded
from fanin.clients.flower.mods import REFUSED, UNSUPPORTED, warnings_of
from fanin.clients.flower.task import AppFailed
from fanin.simulation import SimulationSettings, simulate

PLAN_SEED, DEVICE_SEED = 12345, int.from_bytes(bytes(range(1, 33)), "big")


def draws() -> tuple[object, ...]:
    return random.random(), *np.random.random(3).tolist(), *torch.rand(3).tolist(), *torch.randn(3).tolist()


def test_a_seed_of_the_plan_seeds_as_the_libraries_do() -> None:
    with seeded(PLAN_SEED):
        drawn = draws()
    random.seed(PLAN_SEED)
    np.random.seed(PLAN_SEED)
    torch.manual_seed(PLAN_SEED)
    assert drawn == draws()


@pytest.mark.parametrize("bit", [0, 31, 40, 100, 255])
def test_each_bit_of_a_seed_of_a_device_counts_in_each_library(bit: int) -> None:
    with seeded(DEVICE_SEED):
        drawn = draws()
    with seeded(DEVICE_SEED):
        assert draws() == drawn
    with seeded(DEVICE_SEED ^ 1 << bit):
        other = draws()
    assert all(one != two for one, two in zip(drawn, other, strict=True))


def test_torch_continues_from_the_words_of_a_mersenne_twister() -> None:
    with seeded(DEVICE_SEED):
        state = torch.get_rng_state().numpy().tobytes()
        drawn = torch.rand(1000)
    twin = np.random.RandomState()
    twin.set_state(("MT19937", np.frombuffer(state[24 : 24 + 8 * 624], "<u8").astype(np.uint32), 624))
    words = twin.randint(0, 1 << 32, 1000, dtype=np.uint64) & ((1 << 24) - 1)
    np.testing.assert_array_equal(drawn.numpy(), words.astype(np.float32) * np.float32(2.0**-24))


LATE = """
import sys
from fanin.clients.flower.generators import seeded
with seeded({seed}):
    assert "torch" not in sys.modules
    import torch
    import torch._dynamo
    late = torch.rand(4).tolist()
    print(torch.__spec__.loader.get_source("torch")[:3])
with seeded({seed}):
    assert torch.rand(4).tolist() == late
assert not any(type(each).__name__ == "_TorchFinder" for each in sys.meta_path)
"""


@pytest.mark.parametrize("seed", [PLAN_SEED, DEVICE_SEED], ids=["plan", "device"])
def test_torch_is_seeded_if_the_app_imports_it_in_its_training(seed: int) -> None:
    command = [sys.executable, "-W", "error", "-c", LATE.format(seed=seed)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def reply(message: Message, context: Context) -> Message:
    return message


def own_mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    return call_next(message, context)


class OwnNoise(LocalDpMod):
    """A mod that is derived from one of Flower."""


def test_the_mods_of_an_app_and_of_its_functions_are_named() -> None:
    noise = LocalDpMod(1.0, 0.1, 1.0, 1e-5)
    app = ClientApp(mods=[own_mod, noise])
    app.train(mods=[fixedclipping_mod])(reply)
    app.evaluate()(reply)
    texts = warnings_of(app._registered_funcs.values())
    assert [text.split()[1] for text in texts] == ["LocalDpMod", "fixedclipping_mod"]
    assert texts[0].startswith("mod LocalDpMod is not supported: a Mersenne Twister draws its noise")
    legacy = ClientApp(client_fn=lambda context: None, mods=[OwnNoise(1.0, 0.1, 1.0, 1e-5)])  # type: ignore[arg-type, return-value]  # it is not called
    assert [text.split()[1] for text in warnings_of((legacy._call,))] == ["LocalDpMod"]
    plain = ClientApp(mods=[own_mod])
    plain.train()(reply)
    assert warnings_of((None, *plain._registered_funcs.values())) == ()


@pytest.mark.parametrize("mod", [secagg_mod, secaggplus_mod])
def test_a_mod_that_masks_is_refused_before_the_first_round(mod: Mod) -> None:
    app = ClientApp(mods=[own_mod, mod])
    app.train()(reply)
    settings = SimulationSettings(initial=[np.zeros(1)], quiet=True)
    with raises(
        AppFailed,
        f"flower app ClientApp: got the mod {mod.__name__}, but it needs messages of Flower's server, which fanin does "
        "not send, so nothing would be masked; remove it, and read docs/explanation/privacy.md#mods",
    ):
        simulate(app, 2, cohort=2, rounds=1, settings=settings)


def test_the_tables_have_mods_of_flower() -> None:
    assert {*UNSUPPORTED, *REFUSED} <= set(flwr.client.mod.__all__)
