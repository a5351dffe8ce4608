"""Random numbers of a train step: identical words, uniform values and normal values on every machine."""

import hashlib
import math
import statistics

import numpy as np
import pytest

from fanin.edge.runtimes.randomness import draw, normals, philox, philox_blocks, random_key, random_port, random_ports
from fanin.edge.signatures import Port
from fanin.protos.errors import InvalidBundle


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_has_the_words_that_its_authors_publish(counter: str, key: str, words: str) -> None:
    low, high = (int(word, 16) for word in key.split())
    counters = [np.array([int(word, 16)], np.uint64) for word in counter.split()]
    blocks = philox_blocks(counters, low | high << 32)
    assert [int(word[0]) for word in blocks] == [int(word, 16) for word in words.split()]


def test_a_draw_depends_on_the_key_the_step_and_its_number_alone() -> None:
    key = random_key(7, 3, 1)
    assert key == int.from_bytes(hashlib.sha256(b"fanin.random.v1:7:3:1").digest()[:8], "big")
    uniform, normal = random_port("uniform", 0, (2, 3)), random_port("normal", 1, (5,))
    assert draw(uniform, key, 0).tobytes().hex() == ("f4e97b3e151e323fee43a93e1e607f3f5468033eed1b1e3f")
    assert draw(normal, key, 2).tobytes().hex() == "4be3ce3b9610733ff69d3bbf1ef0a13fa88f9b3e"
    long = philox(key, (0, 0), 1001)
    assert np.array_equal(long[:6], philox(key, (0, 0), 6))
    others = [philox(key, (1, 0), 6), philox(key, (0, 1), 6), philox(random_key(7, 4, 1), (0, 0), 6)]
    assert len({words.tobytes() for words in (long[:6], *others)}) == 4


def test_uniform_values_are_below_one_and_normal_ones_invert_the_distribution() -> None:
    words = np.concatenate(
        [philox(5, (0, 0), 5000), np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)]
    )
    expected = np.array([statistics.NormalDist().inv_cdf((int(word) + 0.5) / 2**32) for word in words])
    np.testing.assert_allclose(normals(words), expected.astype(np.float32), rtol=1e-7, atol=0)
    values = draw(random_port("uniform", 2, (1000,)), 5, 1)
    assert values.dtype == np.float32
    assert values.min() >= 0.0
    assert values.max() < 1.0
    assert set(np.unique(values * 2**24 % 1.0)) == {0.0}


def port(name: str, *shape: int, dtype: str = "float32") -> Port:
    return Port(name=name, dtype=dtype, shape=shape)


def test_the_random_inputs_of_a_graph_are_selected_by_name() -> None:
    inputs = [port("parameter.normal.0", 2), port("normal.1", 4, 2), port("x", 4, 2), port("uniform.0", 4)]
    ports = random_ports(inputs)
    assert ports == (random_port("uniform", 0, (4,)), random_port("normal", 1, (4, 2)))
    assert [each.size_bytes for each in ports] == [16, 32]


@pytest.mark.parametrize(
    ("ports", "message"),
    [
        ([port("uniform.1", 2)], "got the random inputs ['uniform.1'], expected the numbers 0 to 0"),
        ([port("uniform.0", 2), port("normal.0", 2)], "expected the numbers 0 to 1"),
        (
            [port("normal.first", 2)],
            "got the random input 'normal.first' as float32 (2,), expected uniform.<number> or",
        ),
        ([port("normal.0", 2, dtype="int32")], "got the random input 'normal.0' as int32 (2,), expected uniform.<num"),
        (
            [port("normal.0", -1)],
            "as float32 (n,), expected uniform.<number> or normal.<number> as float32 of a fixed",
        ),
        ([port("normal.0", 4 << 20, 2)], f"got {32 << 20} bytes of random inputs a step, expected at most {16 << 20}"),
    ],
)
def test_other_random_inputs_are_refused(ports: list[Port], message: str) -> None:
    with pytest.raises(InvalidBundle) as excinfo:
        random_ports(ports)
    assert message in str(excinfo.value)


def test_draws_of_many_values_differ_from_each_other() -> None:
    values = draw(random_port("normal", 0, (20_000,)), 9, 4)
    assert abs(float(values.mean())) < 5 / math.sqrt(len(values))
    assert abs(float(values.std()) - 1.0) < 0.02
