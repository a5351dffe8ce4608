"""A backup in an object store whose certificate is of a private authority, which the environment names."""

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import boto3
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from support.virtual import bundle_in, open_place, plan, start
from werkzeug.serving import WSGIRequestHandler, make_server

from fanin.commands.care.backup import main, restore_main
from fanin.protos.errors import Untrusted
from fanin.server.access.authority import local_identity
from fanin.server.aggregation.verify import verify_run
from fanin.server.folder import open_archive
from fanin.simulation import run_virtual

URL = "s3://care/coordinator"


class Quiet(WSGIRequestHandler):
    """Logs no call."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing."""


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Serve S3 over TLS. The file of credentials has the only key. Yield the certificate of the authority."""
    tls, credentials = tmp_path / "store", tmp_path / "credentials"
    local_identity(tls, ["127.0.0.1"], datetime.now(UTC))
    pair = (str(tls / "server.pem"), str(tls / "server.key"))
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet, ssl_context=pair)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    credentials.write_text("[default]\naws_access_key_id = test\naws_secret_access_key = very-secret\n")
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "PROFILE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    for name, value in {
        "ENDPOINT_URL": f"https://127.0.0.1:{server.server_port}",
        "SHARED_CREDENTIALS_FILE": str(credentials),
        "DEFAULT_REGION": "us-east-1",
        "CA_BUNDLE": str(tls / "ca.pem"),
        # A certificate that does not verify is tried again for seconds.
        "MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    boto3.resource("s3").create_bucket(Bucket="care")
    yield tls / "ca.pem"
    server.shutdown()
    server.server_close()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The folder of a coordinator with one Run."""

    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(concurrency=1, buffer=1, quorum=1))
        await place.runs.stop()

    run_virtual(main())
    return tmp_path / "state"


def test_a_store_with_a_private_authority_holds_a_backup(tmp_path: Path, state: Path, authority: Path) -> None:
    assert main([URL, "--state", str(state), "--quiet"]) == 0
    assert restore_main([URL, "--state", str(tmp_path / "new"), "--was-stopped", "--quiet"]) == 0
    assert [each.problem for each in verify_run(open_archive(tmp_path / "new"), "run")] == [""]


@pytest.mark.parametrize("bundle", ["another authority", "no file", "no certificate", "none"])
def test_a_store_that_does_not_verify_is_one_error_that_names_the_variable(
    tmp_path: Path, state: Path, authority: Path, bundle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ca.pem"
    if bundle == "another authority":
        path.write_bytes(local_identity(tmp_path / "other", ["127.0.0.1"], datetime.now(UTC)).ca_certificate)
    elif bundle == "no certificate":
        path.write_text("no certificate\n")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(path))
    if bundle == "none":
        monkeypatch.delenv("AWS_CA_BUNDLE")
    with pytest.raises(Untrusted) as error:
        main([URL, "--state", str(state), "--quiet"])
    assert error.value.code == "FN-1520"
    text = str(error.value)
    assert "AWS_CA_BUNDLE" in text and (bundle == "none" or str(path) in text)
    assert "very-secret" not in text and "\n" not in text
