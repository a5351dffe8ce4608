"""A token that is refused, and a device that needs none: each cause has one code, for its holder alone.

Devices and people enter by the wire and by ``fanin doctor``.
"""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.commands import Fanin, fanin_in_process
from support.hosted import Hosted

from fanin.clients.administrator import new_secret
from fanin.clients.device.storage.cache import Cache
from fanin.clients.transport import Connection, GrpcTransport
from fanin.edge.codecs.fixed import CODECS
from fanin.protos import messages as m
from fanin.protos.calls import device_id_of
from fanin.protos.errors import FaninError, Unauthenticated

USED_UP, REVOKED, EXPIRED, UNKNOWN, OTHER_KIND = "FN-1412", "FN-1415", "FN-1492", "FN-0670", "FN-1493"
REMOVED, BANNED = "FN-1495", "FN-1413"
CAPABILITIES = m.Capabilities(codecs=tuple(CODECS), runtimes=("synthetic 1",), graph_formats=("onnx",))
LIFETIME_S = 0.2
MEANING = {USED_UP: "used up", REVOKED: "revoked", EXPIRED: "expired", UNKNOWN: "no token", OTHER_KIND: "other kind"}


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    for variable in ("FANIN_DEVICE_TOKEN", "FANIN_OPERATOR_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A coordinator."""
    host = Hosted(tmp_path_factory.mktemp("host")).start()
    yield host
    host.stop()


@pytest.fixture
def own_host(tmp_path: Path) -> Iterator[Hosted]:
    """A coordinator that a test may restart."""
    host = Hosted(tmp_path / "host").start()
    yield host
    host.stop()


@dataclass
class Site:
    """A device of a coordinator, with its folder."""

    host: Hosted
    folder: Path

    @property
    def state(self) -> Path:
        """The folder of the device."""
        return self.folder / "device"

    def call(self, token: str | None) -> str:
        """Enroll with a token, or check in for None. Return the code of the error; "" without one."""
        self.state.mkdir(exist_ok=True)
        line = Connection(self.host.address, self.host.ca)
        with closing(GrpcTransport(line, Cache(self.state, 1 << 20).key())) as transport:
            try:
                if token is None:
                    transport.check_in(m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=0.0))
                else:
                    transport.enroll(token)
            except FaninError as exc:
                return exc.code
        return ""

    def change(self, what: m.BanDevice | m.RemoveDevice) -> None:
        """Ban or remove the device."""
        device_id = device_id_of(Cache(self.state, 1 << 20).key().public)
        with self.host.administrator() as administrator:
            administrator.change_device(m.DeviceChange(device_id=device_id, what=what))

    def doctor(self, fanin: Fanin, token: str) -> tuple[int, dict[str, tuple[str, str, str]]]:
        """Return the exit status of ``fanin doctor``, and (level, code, text) of each check."""
        (self.folder / "token").write_text(token)
        (self.folder / "token").chmod(0o600)
        (self.folder / "ca.pem").write_bytes(self.host.ca)
        options = ("--server", self.host.address, "--ca", self.folder / "ca.pem")
        state = ("--state", self.state) if self.state.exists() else ()
        outcome = fanin("doctor", *options, *state, "--token-file", self.folder / "token", "--json")
        findings = json.loads(outcome.out)["findings"]
        return outcome.status, {
            each["check"]: (each["level"], each["code"], each["text"] + each["fix"]) for each in findings
        }


@pytest.fixture
def site(host: Hosted, tmp_path: Path) -> Site:
    """A device that has not enrolled."""
    return Site(host, tmp_path)


def token_of(host: Hosted, name: str, role: m.Role, fault: str) -> str:
    """Create a token that is refused for a reason, and return its secret."""
    secret, sha256 = new_secret()
    lifetime_s = LIFETIME_S if fault == EXPIRED else None
    new = m.NewToken(name=f"{name}-{fault}", role=role, sha256=sha256, lifetime_s=lifetime_s)
    if fault == UNKNOWN:
        return secret
    with host.administrator() as administrator:
        if fault == USED_UP:
            administrator.create_token(m.NewToken(name=new.name, role=role, sha256=sha256, max_uses=1))
        else:
            administrator.create_token(new)
        if fault == REVOKED:
            administrator.revoke_token(new.name)
    if fault == EXPIRED:
        time.sleep(LIFETIME_S)
    return secret


@pytest.mark.parametrize("fault", [USED_UP, REVOKED, EXPIRED, UNKNOWN, OTHER_KIND])
def test_each_fault_of_an_enrollment_token_has_one_code(site: Site, fanin: Fanin, fault: str) -> None:
    role = m.Role.VIEWER if fault == OTHER_KIND else m.Role.DEVICE
    secret = token_of(site.host, f"ward-{site.folder.name}", role, fault)
    if fault == USED_UP:
        (site.folder / "first").mkdir()
        assert Site(site.host, site.folder / "first").call(secret) == ""
    assert site.call(secret) == fault
    status, findings = site.doctor(fanin, secret)
    assert (status, findings["token"][:2]) == (1, ("fail", fault))
    assert findings["device"][0] == "warn"
    assert MEANING[fault] in fanin("explain", fault).out.partition("\n")[0]
    assert "FN-0009" not in findings["token"][2] and "by 1 devices" not in findings["token"][2]


@pytest.mark.parametrize("fault", [REVOKED, EXPIRED, UNKNOWN, OTHER_KIND])
def test_each_fault_of_the_token_of_a_person_has_one_code(host: Hosted, fault: str) -> None:
    role = m.Role.DEVICE if fault == OTHER_KIND else m.Role.VIEWER
    secret = token_of(host, "anna", role, fault)
    with host.operator(secret) as operator, pytest.raises(Unauthenticated) as excinfo:
        operator.runs()
    assert excinfo.value.code == fault
    # The name of the token is for the holder of its secret, who knows it.
    assert (f"anna-{fault}" in str(excinfo.value)) is (fault != UNKNOWN)


@pytest.mark.parametrize("fault", [USED_UP, REVOKED, EXPIRED, UNKNOWN])
def test_an_enrolled_device_needs_no_valid_token(site: Site, fanin: Fanin, fault: str) -> None:
    secret = token_of(site.host, f"home-{site.folder.name}", m.Role.DEVICE, fault)
    assert site.call(secret if fault == USED_UP else site.host.device_token) == ""
    for token in (secret, ""):
        assert site.call(token) == "", "a start of an enrolled device"
    status, findings = site.doctor(fanin, secret)
    assert status == 0, findings
    levels = {name: findings[name][0] for name in ("clock", "protocol", "token", "device")}
    assert levels == dict.fromkeys(levels, "ok")
    assert "needs none" in findings["token"][2]


def test_an_enrolled_device_with_the_token_of_a_person_is_warned(site: Site, fanin: Fanin) -> None:
    assert site.call(site.host.device_token) == ""
    status, findings = site.doctor(fanin, site.host.operator_token)
    assert (status, findings["token"][:2]) == (0, ("warn", OTHER_KIND))
    assert "fanin token rotate" in findings["token"][2]


def test_a_coordinator_whose_first_enrollment_token_is_revoked_is_healthy(own_host: Hosted, fanin: Fanin) -> None:
    tokens = own_host.state / "tokens"
    tokens.mkdir(mode=0o700)
    (tokens / "device.token").write_text(own_host.device_token)
    (own_host.state / "address").write_text(own_host.address)
    with own_host.administrator() as administrator:
        administrator.revoke_token("device")
    outcome = fanin("doctor", "--state", own_host.state, "--json")
    findings = {each["check"]: each for each in json.loads(outcome.out)["findings"]}
    assert (findings["token"]["level"], findings["token"]["code"]) == ("warn", REVOKED)


def test_an_operator_without_a_device_may_examine_the_token_of_a_person(site: Site, fanin: Fanin) -> None:
    status, findings = site.doctor(fanin, site.host.operator_token)
    assert (status, findings["token"][0]) == (0, "ok")


@pytest.mark.parametrize(("what", "code"), [(m.BanDevice(), BANNED), (m.RemoveDevice(), REMOVED)])
def test_a_banned_or_removed_device_is_told_so(
    site: Site, fanin: Fanin, what: m.BanDevice | m.RemoveDevice, code: str
) -> None:
    secret = token_of(site.host, f"one-{site.folder.name}", m.Role.DEVICE, USED_UP)
    assert site.call(secret) == ""
    site.change(what)
    # Also at its next start, when it enrolls again with its token, which is used up.
    assert (site.call(None), site.call(secret)) == (code, code)
    status, findings = site.doctor(fanin, secret)
    assert (status, findings["device"][:2]) == (1, ("fail", code))
    assert "another coordinator" not in findings["device"][2]


def test_a_removal_is_remembered_until_the_device_enrolls_again(own_host: Hosted, tmp_path: Path) -> None:
    host, site = own_host, Site(own_host, tmp_path)
    assert site.call(host.device_token) == ""
    site.change(m.RemoveDevice())
    host.stop()
    host.start()
    assert site.call(None) == REMOVED
    assert site.call(host.device_token) == ""
    assert site.call(None) == ""


def test_the_doctor_of_a_healthy_device_leaves_no_line_in_the_log(
    site: Site, fanin: Fanin, caplog: pytest.LogCaptureFixture
) -> None:
    assert site.call(site.host.device_token) == ""
    caplog.set_level("INFO", "fanin.server.access")
    assert site.doctor(fanin, site.host.device_token)[0] == 0
    assert [record.getMessage() for record in caplog.records if record.name == "fanin.server.access"] == []


def test_the_first_tokens_have_names_that_say_what_they_are_for(host: Hosted) -> None:
    with host.administrator() as administrator:
        names = {token.name for token in administrator.tokens()}
    assert {"admin", "device"} <= names
