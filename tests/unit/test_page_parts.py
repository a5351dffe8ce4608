"""Parts of the page without a coordinator: vendored files, cookies, and forms of values."""

import hashlib
import re
from pathlib import Path

import pytest

from fanin.server.rounds.recent import WorkTimes, round_times
from fanin.server.web.rendering import STATIC, clean, duration, environment, moment, number, size
from fanin.server.web.sessions import SESSION_S, Sessions


def test_vendored_files_are_those_of_their_digests() -> None:
    text = (STATIC / "uplot" / "VENDORED.md").read_text()
    digests = dict(re.findall(r"([0-9a-f]{64})  (\S+)", text))
    assert {digests[name]: name for name in digests} == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (STATIC / "uplot").iterdir()
        if path.name != "VENDORED.md"
    }


def test_every_template_compiles() -> None:
    for name in environment().list_templates():
        environment().get_template(name)


def test_a_session_ends_and_cannot_be_forged(tmp_path: Path) -> None:
    now = [1000.0]
    sessions = Sessions(tmp_path / "one", lambda: now[0])
    cookie = sessions.open("ab" * 32)
    session = sessions.read(cookie)
    assert session is not None and session.token_sha256 == "ab" * 32
    assert not sessions.is_old(session)
    assert Sessions(tmp_path / "two", lambda: now[0]).read(cookie) is None
    assert Sessions(tmp_path / "one", lambda: now[0]).read(cookie) == session
    for wrong in ("", "x", "..", cookie[:-1], cookie.replace("ab", "cd", 1), f"{cookie}\u00e9"):
        assert sessions.read(wrong) is None
    now[0] += SESSION_S - 1
    assert sessions.is_old(session) and sessions.read(cookie) == session
    now[0] += 1
    assert sessions.read(cookie) is None


def test_signing_out_ends_every_copy_of_a_cookie_also_after_a_restart(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, lambda: 1000.0)
    cookies = [sessions.open("ab" * 32), sessions.open("cd" * 32)]
    sessions.end("ab" * 32)
    again = Sessions(tmp_path, lambda: 1000.0)
    for one in (sessions, again):
        assert one.read(cookies[0]) is None
        assert one.read(cookies[1]) is not None
        assert one.read(one.open("ab" * 32)) is not None
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "shown"),
    [("plain é 漢", "plain é 漢"), ("a\u202eb\x00c\x1b[1m", "a\ufffdb\ufffdc\ufffd[1m"), ("x\u2028y", "x\ufffdy")],
)
def test_control_characters_are_replaced(value: str, shown: str) -> None:
    assert clean(value) == shown
    template = environment().from_string("{{ value }}")
    assert template.render(value=f"<b>{value}") == f"&lt;b&gt;{shown}"


def test_forms_of_values() -> None:
    assert [duration(each) for each in (0.25, 59.6, 61, 3600, 90_061, None)] == [
        *("0.2 s", "60 s", "1 min 1 s", "1 h", "1 d 1 h"),
        "\N{EN DASH}",
    ]
    assert [size(each) for each in (0, 999, 1500, 2.5e9, 3e15)] == ["0 B", "999 B", "1.5 kB", "2.5 GB", "3000.0 TB"]
    assert (number(1234567), number(float("nan"))) == ("1\u202f234\u202f567", "\N{EN DASH}")
    assert moment(0.0) == '<time datetime="1970-01-01T00:00:00.000+00:00">1970-01-01 00:00:00 UTC</time>'


def test_the_parts_of_a_round_add_up_to_its_duration() -> None:
    times = WorkTimes(opened=100.0)
    work = []
    for device, assigned, upload, committed in (("a", 101.0, 111.0, 113.0), ("b", 103.0, 107.0, 108.0)):
        times.begin(device, assigned)
        times.upload(device, upload)
        times.upload(device, upload + 0.5)
        worked = times.commit(device, committed)
        assert worked is not None
        work.append((worked, 8.0))
    assert times.commit("unknown", 120.0) is None
    parts = round_times(work, closed_s=14.0, published_s=15.5)
    assert parts is not None
    # The device b reports more seconds of training than have passed.
    assert (parts.num_devices, parts.train_s, parts.download_s, parts.upload_s) == (2, 6.0, 1.0, 1.5)
    assert (parts.wait_s, parts.fold_s) == (5.5, 1.5)
    total = parts.wait_s + parts.download_s + parts.train_s + parts.upload_s + parts.fold_s
    assert total == pytest.approx(15.5)
    assert round_times([], 14.0, 15.5) is None
