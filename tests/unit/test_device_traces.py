"""Recorded devices: their files, their speed over time, and simulations of them. Without torch."""

import bz2
import gzip
import hashlib
import json
import lzma
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from support.errors import raises

from fanin.protos.errors import InvalidInput
from fanin.simulation import Battery, DeviceModel, DeviceTrace, Fixed, Rate, Trace, Traces, read_devices, read_traces

DEVICES = """client,time,state,examples_per_s,bytes_down_per_s,bytes_up_per_s,battery_work_s,battery_charge_s
10,0,on,100,2e6,5e5,1800,7200
2,5.5,on,20,1e6,1e5,600,3600
2,9,off,40,,1e5,,
"""
SECOND = DeviceTrace(
    availability=Trace(changes=((5.5, True), (9.0, False))),
    examples_per_s=Rate(changes=((5.5, 20.0), (9.0, 40.0))),
    bytes_down_per_s=1e6,
    bytes_up_per_s=1e5,
    battery=Battery(work_s=600.0, charge_s=3600.0),
)


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_has_the_presence_speed_bandwidth_and_battery_of_each_device(tmp_path: Path) -> None:
    traces = read_traces(written(tmp_path / "devices.csv", DEVICES))
    assert traces.devices[0] == SECOND
    assert traces.devices[1] == DeviceTrace(
        availability=Trace(changes=((0.0, True),)),
        examples_per_s=100.0,
        bytes_down_per_s=2e6,
        bytes_up_per_s=5e5,
        battery=Battery(work_s=1800.0, charge_s=7200.0),
    )
    assert traces.sha256 == hashlib.sha256(DEVICES.encode()).hexdigest()


def test_a_first_value_also_holds_before_its_time(tmp_path: Path) -> None:
    text = "client,time,state,examples_per_s,bytes_up_per_s\na,5,,,7\na,9,on,3,\na,12,,,\na,20,off,4,\n"
    assert read_traces(written(tmp_path / "devices.csv", text)).devices == (
        DeviceTrace(
            availability=Trace(changes=((9.0, True), (20.0, False))),
            examples_per_s=Rate(changes=((9.0, 3.0), (20.0, 4.0))),
            bytes_up_per_s=7.0,
        ),
    )


def test_a_row_a_device_needs_no_time(tmp_path: Path) -> None:
    traces = read_traces(written(tmp_path / "devices.csv", "client,examples_per_s\na,5\nb,7\n"))
    assert traces.devices == (DeviceTrace(examples_per_s=5.0), DeviceTrace(examples_per_s=7.0))


def rows_of(text: str) -> list[Mapping[str, str | float]]:
    names, *lines = (line.split(",") for line in text.splitlines())
    cells = [dict(zip(names, line, strict=True)) for line in lines]
    return [{name: value if name == "state" else float(value) for name, value in row.items() if value} for row in cells]


def test_json_lines_and_parquet_have_the_same_devices(tmp_path: Path) -> None:
    rows = rows_of(DEVICES)
    lines = [json.dumps({**row, "client": int(row["client"])}) for row in rows]
    expected = read_traces(written(tmp_path / "devices.csv", DEVICES)).devices
    assert read_traces(written(tmp_path / "devices.jsonl", "\n".join(lines))).devices == expected
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    named = [{**row, "client": str(int(row["client"]))} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(named), tmp_path / "devices.parquet")
    assert read_traces(tmp_path / "devices.parquet").devices == expected
    parquet.write_table(pyarrow.table({"client": ["a", "b"], "examples_per_s": [1.0, -1.0]}), tmp_path / "b.parquet")
    error = f"{tmp_path}/b.parquet: row 2, client 'b', column examples_per_s: got -1.0, expected a number above 0"
    with raises(InvalidInput, error):
        read_traces(tmp_path / "b.parquet")


@pytest.mark.parametrize(
    ("name", "compress"), [("gzip", gzip.compress), ("bzip2", bz2.compress), ("xz", lzma.compress)]
)
def test_a_compressed_file_is_named_as_one(name: str, compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "devices.csv"
    path.write_bytes(compress(DEVICES.encode()))
    formats = "CSV, Parquet (.parquet) or JSON lines (.jsonl)"
    with raises(InvalidInput, f"{path}: got a file compressed by {name}, expected {formats}; decompress it"):
        read_traces(path)


def test_a_repeated_key_of_json_is_named(tmp_path: Path) -> None:
    text = '{"client": 1, "examples_per_s": 5}\n{"client": 2, "examples_per_s": 5, "examples_per_s": 7}'
    path = written(tmp_path / "devices.jsonl", text)
    error = f"{path}: line 2: got 2 values of the key 'examples_per_s', expected one; remove the others"
    with raises(InvalidInput, error):
        read_traces(path)


def test_several_paths_are_refused() -> None:
    error = (
        "traces: got ['a.csv', 'b.csv'], expected the path of one file; pass several files as [read_traces(first), "
        "read_traces(second)]"
    )
    with raises(InvalidInput, error):
        read_traces(["a.csv", "b.csv"])  # type: ignore[arg-type]


def test_files_of_spreadsheets_are_read(tmp_path: Path) -> None:
    """They begin with a byte order mark, and may end with an empty line."""
    path = written(tmp_path / "trace.csv", "\ufeffclient, time, state\r\n1,5,on\r\n\r\n")
    assert read_traces(path).devices == (DeviceTrace(availability=Trace(changes=((5.0, True),))),)
    written(tmp_path / "devices.toml", "\ufefftraces = 'trace.csv'\n")
    assert read_devices(tmp_path / "devices.toml").sources == (read_traces(path),)


def test_devices_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    names = ["b", "10", "²", "9", "a"]
    lines = [f"{name},{number}" for number, name in enumerate(names, start=1)]
    path = written(tmp_path / "trace.csv", "\n".join(["client,examples_per_s", *lines]))
    order = [float(names.index(name) + 1) for name in ("9", "10", "a", "b", "²")]
    assert [each.examples_per_s for each in read_traces(path).devices] == order


ALL = "client, time, state, examples_per_s, bytes_down_per_s, bytes_up_per_s, battery_work_s, battery_charge_s"


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("a.csv", "", "got the columns none, expected client and at least one of state, examples_per_s, "),
        ("a.csv", "client,time\n1,0\n", "got the columns client, time, expected client and at least one of state, "),
        ("a.csv", "client,speed,state\n", f"got the unknown columns speed, expected only {ALL}"),
        ("a.csv", "client,client,state\n", "got the columns client, client, state, expected each one once"),
        ("a.csv", "client,state\n1,on\n", "got the columns client, state, expected time beside state: the seconds "),
        ("a.csv", "client,battery_work_s\n", "got the columns client, battery_work_s, expected both of battery_"),
        ("a.csv", "client,time,state\n", "got no rows, expected a row for at least one device"),
        ("a.jsonl", "\n", "got the columns none, expected client and at least one of "),
        ("a.jsonl", "[1, 0]\n", "line 1: got [1, 0], expected an object with client and other columns"),
        ("a.jsonl", "{\n", "line 1: no JSON ("),
        (
            "a.jsonl",
            '{"client": null, "time": 0, "state": "on"}',
            "line 1, column client: got None, expected the name of a ",
        ),
        ("a.csv", "client,time,state\n,0,on\n", "line 2, column client: got '', expected the name of a device"),
        ("a.csv", "client,time,state\n1,now,on\n", "line 2, client '1', column time: got 'now', expected a number"),
        ("a.csv", "client,time,state\n7,-1,on\n", "line 2, client '7', column time: got '-1', expected 0 or more"),
        (
            "a.csv",
            "client,time,state\n7,5,on\n8,1,on\n7,5,off\n",
            "line 4, client '7', column time: got '5', expected a time above 5, that of its row before",
        ),
        ("a.csv", "client,time,state\n1,0,yes\n", "line 2, client '1', column state: got 'yes', expected on or off"),
        ("a.csv", "client,time,state\n\n1,0,on,9\n", "line 3: got 4 values, expected 3 as in the first line"),
        (
            "a.csv",
            "client,bytes_up_per_s\n1,9\n2,-5\n",
            "line 3, client '2', column bytes_up_per_s: got '-5', expected a number above 0",
        ),
        ("a.csv", "client,examples_per_s\n1,0\n", "line 2, client '1', column examples_per_s: got '0', expected a "),
        ("a.csv", "client,examples_per_s\n1,inf\n", "line 2, client '1', column examples_per_s: got 'inf', expected "),
        (
            "a.csv",
            "client,time,examples_per_s\n1,0,3\n2,0,\n2,5, \n",
            "client '2', column examples_per_s: got no value, expected one in a row of this device",
        ),
        ("a.csv", "client,time,state\n1,0,\n", "client '1', column state: got no value, expected one in a row of this"),
        (
            "a.jsonl",
            '{"client": 1, "time": 0, "state": "on"}\n{"client": 1, "time": 5, "state": true}',
            "line 2, client '1', column state: got True, expected on or off",
        ),
        (
            "a.csv",
            "client,examples_per_s\n1,3\n1,4\n",
            "line 3, client '1': got a second row, expected one for each client, or the column time",
        ),
        (
            "a.csv",
            "client,time,battery_work_s,battery_charge_s\n1,0,10,20\n1,5,11,20\n",
            "line 3, client '1', column battery_work_s: got 11 after 10, expected one battery for each device; leave",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_row_and_column(name: str, text: str, error: str, tmp_path: Path) -> None:
    path = written(tmp_path / name, text)
    with pytest.raises(InvalidInput) as excinfo:
        read_traces(path)
    assert str(excinfo.value).startswith(f"{path}: {error}")


def test_work_takes_the_time_of_each_speed_that_it_meets() -> None:
    rate = Rate(changes=((10.0, 2.0), (20.0, 1.0), (30.0, 10.0)))
    assert rate.seconds(4.0, 0.0) == 2.0  # The first speed also holds before its time.
    assert rate.seconds(4.0, 18.0) == 2.0
    assert rate.seconds(8.0, 18.0) == 6.0
    assert rate.seconds(114.0, 18.0) == 22.0
    assert rate.seconds(5.0, 99.0) == 0.5
    assert rate.seconds(0.0, 25.0) == 0.0


def test_clients_beyond_the_last_device_draw_one_with_the_seed() -> None:
    traces = Traces(devices=tuple(DeviceTrace(examples_per_s=float(speed)) for speed in range(1, 6)))
    model = DeviceModel(traces=traces, bytes_up_per_s=3.0)

    def speeds(seed: int) -> list[object]:
        return [model.habits(client, 10, seed).examples_per_s for client in range(50)]

    assert speeds(0)[:5] == speeds(1)[:5] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert speeds(0) == speeds(0) != speeds(1)
    assert set(speeds(0)[5:]) == {1.0, 2.0, 3.0, 4.0, 5.0}
    assert model.habits(7, 10, 0).bytes_up_per_s == 3.0


def test_a_model_has_each_attribute_once() -> None:
    speeds, present = DeviceTrace(examples_per_s=1.0), DeviceTrace(availability=Trace(changes=((0.0, True),)))
    model = DeviceModel(traces=(Traces(devices=(speeds,)), Traces(devices=(present,))))
    assert model.habits(0, 10, 0).availability == present.availability and model.has("examples_per_s")
    twice = "devices: examples_per_s: got it twice, expected it once: in one of the traces, or as an attribute of "
    with pytest.raises(InvalidInput, match=twice):
        DeviceModel(traces=Traces(devices=(speeds,)), examples_per_s=Fixed(value=2.0))
    with pytest.raises(InvalidInput, match=twice):
        DeviceModel(traces=(Traces(devices=(speeds,)), Traces(devices=(speeds,))))
    with pytest.raises(InvalidInput, match="FN-1160"):
        Traces(devices=(speeds, present))
    with pytest.raises(InvalidInput, match="FN-1156"):
        DeviceModel(traces="devices.csv")


def test_a_client_is_one_device_of_all_files(tmp_path: Path) -> None:
    names = ["10", "2", "b", "a", "7"]
    up = "".join(f"{name},{1000 + at}\n" for at, name in enumerate(names))
    speed = "".join(f"{name},{1 + names.index(name)}\n" for name in reversed(names))
    written(tmp_path / "up.csv", f"client,bytes_up_per_s\n{up}")
    written(tmp_path / "speed.csv", f"client,examples_per_s\n{speed}")
    model = read_devices(written(tmp_path / "devices.toml", 'traces = ["up.csv", "speed.csv"]\n'))
    devices = [model.habits(client, 10, 0) for client in range(50)]
    assert [each.bytes_up_per_s for each in devices] == [999.0 + each.examples_per_s for each in devices]
    assert len({each.examples_per_s for each in devices[5:]}) == 5


def test_files_with_other_devices_are_refused(tmp_path: Path) -> None:
    def traces(name: str, *clients: str) -> Traces:
        return read_traces(written(tmp_path / "t.csv", f"client,{name}\n" + "".join(f"{each},5\n" for each in clients)))

    error = (
        "devices: traces: got 2 devices that some of the traces do not have: a, c; expected the same names in the "
        "column client of each file"
    )
    with raises(InvalidInput, error):
        DeviceModel(traces=[traces("bytes_up_per_s", "a", "b"), traces("examples_per_s", "b", "c")])
    many = traces("bytes_up_per_s", *(f"x{at}" for at in range(9)), "b")
    with pytest.raises(InvalidInput, match="FN-1158"):
        DeviceModel(traces=[many, traces("examples_per_s", "b")])
    speed, up = DeviceTrace(examples_per_s=1.0), DeviceTrace(bytes_up_per_s=1.0)
    with raises(InvalidInput, "devices: traces: got 2 and 1 device, expected the same devices in the same order"):
        DeviceModel(traces=[Traces(devices=(up, up)), Traces(devices=(speed,))])
    orders = [Traces(devices=(up, up), names=("a", "b")), Traces(devices=(speed, speed), names=("b", "a"))]
    with raises(InvalidInput, "devices: traces: got 2 and 2 devices, expected the same devices in the same order"):
        DeviceModel(traces=orders)
    with raises(InvalidInput, "traces: got 1 name for 2 devices, expected another name for each device, or none"):
        Traces(devices=(up, up), names=("a", "a"))


@pytest.mark.parametrize("value", ["5", '{ sha256 = "00" }', "[{ file = 1 }]", '{ file = "a", digest = "b" }'])
def test_a_wrong_key_of_traces_is_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="FN-1156"):
        read_devices(written(tmp_path / "devices.toml", f"traces = {value}\n"))


def test_a_trace_with_another_digest_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "devices.csv", DEVICES)
    digest = hashlib.sha256(DEVICES.encode()).hexdigest()
    toml = written(tmp_path / "devices.toml", f'traces = {{ file = "devices.csv", sha256 = "{digest}" }}\n')
    assert read_devices(toml).sources[0].devices[0] == SECOND
    path.write_text(DEVICES.replace("100", "101"))
    with pytest.raises(
        InvalidInput, match=rf"devices.csv: got the sha256 \w+, expected {digest}; use the file of that"
    ):
        read_devices(toml)
