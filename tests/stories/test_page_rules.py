"""Who may read and command on the page, and what a request of another site, a proxy or a peer can do there."""

import hashlib
import http.client
import json
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
from support.federations import bundle_in, plan
from support.processes import Running, Site, start
from support.virtual import PUBLISHER

from fanin.clients.administrator import Administrator
from fanin.clients.transport import Connection
from fanin.protos.messages import NewToken, Role

START_S = 30.0
EVIL = '<img src=x onerror="alert(1)">\u202e'


@dataclass
class Answer:
    """A response."""

    status: int
    text: str
    headers: Mapping[str, str]


@dataclass
class Browser:
    """A browser: one cookie, and the token of the last form."""

    host: str
    port: int
    cookie: str = ""
    context: ssl.SSLContext | None = None

    def _connection(self) -> http.client.HTTPConnection:
        if self.context is None:
            return http.client.HTTPConnection(self.host, self.port, timeout=20)
        return http.client.HTTPSConnection(self.host, self.port, timeout=20, context=self.context)

    def send(self, method: str, path: str, body: str | None = None, **headers: str) -> Answer:
        """Return the answer to a request."""
        sent = {"Accept": "text/html"} | {name.replace("_", "-"): each for name, each in headers.items()}
        if self.cookie:
            sent["Cookie"] = self.cookie
        with closing(self._connection()) as connection:
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            return Answer(response.status, response.read().decode(errors="replace"), dict(response.getheaders()))

    def get(self, path: str, **headers: str) -> Answer:
        """Return a page."""
        return self.send("GET", path, **headers)

    def post(self, path: str, fields: Mapping[str, str], **headers: str) -> Answer:
        """Send a form as the page does."""
        origin = f"{'http' if self.context is None else 'https'}://{self.host}:{self.port}"
        return self.send("POST", path, urlencode(fields), **{"Origin": origin, **headers})

    def form_token(self, path: str) -> str:
        """Return the token of the forms of a page."""
        found = re.search(r'name="form_token" value="([0-9a-f]{64})"', self.get(path).text)
        assert found is not None, path
        return found.group(1)

    def login(self, token: str) -> Answer:
        """Sign in, and keep the cookie."""
        answer = self.post("/login", {"token": token, "form_token": self.form_token("/login"), "next": "/runs"})
        if "set-cookie" in answer.headers:
            self.cookie = answer.headers["set-cookie"].partition(";")[0]
        return answer


@dataclass
class PageSite:
    """A coordinator with its page."""

    site: Site
    running: Running
    url: str

    def browser(self) -> Browser:
        """Return a browser without a session."""
        host, _, port = self.url.rstrip("/").rpartition("//")[2].rpartition(":")
        return Browser(host=host, port=int(port))

    @property
    def operator_token(self) -> str:
        """The token of the operator."""
        return (self.site.state / "tokens" / "operator.token").read_text().strip()


def serve(site: Site, *words: str) -> PageSite:
    """Start ``fanin serve`` with a page, and wait until it serves."""
    (site.state / "address").unlink(missing_ok=True)
    command = ["-m", "fanin.commands.main", "serve", "--state", str(site.state), "--listen", site.listen, *words]
    log = site.folder / f"serve-{len(site.started)}.log"
    running = start(command, log)
    site.started.append(running)
    until = time.monotonic() + START_S
    while "page for browsers" not in running.text():
        assert running.process.poll() is None and time.monotonic() < until, running.text()
        time.sleep(0.05)
    site.listen = site.address
    return PageSite(site, running, running.text().partition("page for browsers")[2].split()[0])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageSite]:
    """A coordinator with a Run that has no devices, and a page that only this machine reaches."""
    site = Site(tmp_path_factory.mktemp("page"))
    with ExitStack() as stack:
        stack.callback(site.close)
        page = serve(site, "--web", "127.0.0.1:0")
        site.start_run(plan(2), bundle_in(site.folder), PUBLISHER)
        yield page


def test_every_view_answers_with_the_policy_and_refers_to_no_other_host(served: PageSite) -> None:
    browser = served.browser()
    browser.login(served.operator_token)
    views = ["/runs", "/devices", "/activity", "/settings", "/login"]
    views += [f"/runs/run{tab}" for tab in ("", "/live", "/versions", "/plan", "/events", "/rounds/1")]
    for view in views:
        answer = browser.get(view)
        assert answer.status == 200, (view, answer.text)
        assert answer.headers["content-security-policy"].startswith("default-src 'self'; object-src 'none'"), view
        assert (answer.headers["x-frame-options"], answer.headers["cache-control"]) == ("DENY", "no-store")
        links = re.findall(r'(?:src|href|action)="([^"]*)"', answer.text)
        assert links and all(re.match(r"/(?!/)|#", link) for link in links), (view, links)
        assert not re.search(r"<style|style=|<script(?![^>]* src=)| on[a-z]+=", answer.text), view
    texts = [browser.get(found).text for found in set(re.findall(r'"(/static/[^"]+)"', browser.get("/runs").text))]
    texts.append(browser.get("/static/charts.js").text)
    assert len(texts) == 7
    # The namespace of SVG is a name, and a comment of uPlot has its address.
    known = ("http://www.w3.org/", "https://github.com/leeoniya")
    outside = {each for text in texts for each in re.findall(r"https?://[^\s'\")]+", text)}
    assert {each for each in outside if not each.startswith(known)} == set()


def test_a_foreign_host_or_origin_is_refused(served: PageSite) -> None:
    browser = served.browser()
    assert "FN-1422" in browser.get("/runs", Host="evil.example").text
    assert browser.get("/runs", Host=f"localhost:{browser.port}").status == 200
    assert browser.get("/healthz", Host="10.0.0.7").status == 200
    browser.login(served.operator_token)
    fields = {"what": "pause", "command_id": "a", "form_token": browser.form_token("/runs/run")}
    for origin in ("http://evil.example", "null", "", f"http://localhost:{browser.port + 1}"):
        answer = browser.post("/runs/run/commands", fields, Origin=origin)
        assert (answer.status, "FN-1423" in answer.text) == (403, True), origin
    assert "running" in browser.get("/runs/run").text


def test_a_form_needs_the_token_of_its_session(served: PageSite) -> None:
    browser = served.browser()
    visitor_token = browser.form_token("/login")
    browser.login(served.operator_token)
    for token in ("", "0" * 64, visitor_token):
        answer = browser.post("/runs/run/commands", {"what": "pause", "command_id": "b", "form_token": token})
        assert (answer.status, "FN-1427" in answer.text) == (403, True), token
    answer = browser.post("/runs/run/commands", {"what": "pause", "text": "x" * 20_000})
    assert "FN-1424" in answer.text


def test_commands_need_an_operator_and_are_those_of_the_operators_call(served: PageSite) -> None:
    browser = served.browser()
    assert browser.get("/runs/run").status == 200
    assert "commands" not in browser.get("/runs/run").text
    fields = {"what": "pause", "command_id": "c", "form_token": browser.form_token("/login"), "next": "/runs/run"}
    answer = browser.post("/runs/run/commands", fields)
    assert (answer.status, "FN-1426" in answer.text) == (403, True)
    assert browser.login("wrong").status == 401
    login = browser.login(served.operator_token)
    cookie = login.headers["set-cookie"]
    assert login.status == 303
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and served.operator_token not in cookie
    fields["form_token"] = browser.form_token("/runs/run")
    assert browser.post("/runs/run/commands", fields).headers["location"] == "/runs/run?done=pause"
    assert browser.post("/runs/run/commands", fields).status == 303
    with served.site.operator() as operator:
        assert operator.run("run").state.value == "paused"
    assert "The Run is paused." in browser.get("/runs/run?done=pause").text
    wrong = browser.post("/runs/none/commands", {**fields, "command_id": "d"})
    assert (wrong.status, "FN-0610" in wrong.text) == (404, True)
    resume = {**fields, "what": "resume", "command_id": "e"}
    assert browser.post("/runs/run/commands", resume).status == 303
    # A session that was forged or cut has no rights.
    browser.cookie = browser.cookie[:-1] + ("0" if browser.cookie[-1] != "0" else "1")
    assert browser.post("/runs/run/commands", {**fields, "command_id": "f"}).status == 403


def test_a_viewer_reads_until_its_token_is_revoked_and_commands_are_in_the_audit_log(served: PageSite) -> None:
    browser, secret = served.browser(), "a-viewers-secret-of-32-characters"
    site, behind = served.site, {"X_Forwarded_For": "203.0.113.7"}
    line = Connection(site.address, site.ca)
    try:
        administrator = Administrator(line, served.operator_token)
        token = NewToken(name="vera", role=Role.VIEWER, sha256=hashlib.sha256(secret.encode()).hexdigest())
        administrator.create_token(token)
        assert browser.login(secret).status == 303
        assert browser.get("/runs/run", **behind).status == 200
        assert "commands" not in browser.get("/runs/run").text
        fields = {"what": "stop", "command_id": "v", "form_token": browser.form_token("/runs")}
        assert "FN-1426" in browser.post("/runs/run/commands", fields).text
        for path in ("/devices/x/changes", "/runs/run/commands"):
            assert browser.post(path, fields).status == 403
        administrator.revoke_token("vera")
        assert browser.get("/runs/run", **behind).status == 303
        operator = served.browser()
        operator.login(served.operator_token)
        fields = {"what": "stop", "command_id": "audited", "form_token": operator.form_token("/runs")}
        assert operator.post("/runs/none/commands", fields).status == 404
        entries = [each for each in administrator.audit_page().entries if each.subject.endswith("audited")]
    finally:
        line.close()
    assert [(each.call, each.subject, each.outcome) for each in entries] == [
        ("Command", "run none: stop audited", "begun"),
        ("Command", "run none: stop audited", "refused FN-0610"),
    ]
    assert secret not in served.running.text() and served.operator_token not in served.running.text()


def test_texts_of_peers_are_escaped_and_have_no_control_characters(served: PageSite) -> None:
    browser = served.browser()
    for path in (f"/runs/{quote(EVIL, safe='')}", f"/devices?state={quote(EVIL)}", f"/login?next={quote(EVIL)}"):
        text = browser.get(path).text
        assert "<img" not in text and "\u202e" not in text, path
    for target in ("//evil.example", "https://evil.example", "/\\evil.example"):
        assert f'value="{target}"' not in browser.get(f"/login?next={quote(target)}").text


def test_a_page_behind_a_proxy_needs_a_session(served: PageSite) -> None:
    answer = served.browser().get("/runs", X_Forwarded_For="203.0.113.7")
    assert (answer.status, answer.headers["location"]) == (303, "/login?next=/runs")
    assert served.browser().get("/stream", X_Forwarded_For="203.0.113.7", Accept="text/event-stream").status == 401


def test_a_wrong_cursor_is_an_error_of_the_reader(served: PageSite) -> None:
    browser = served.browser()
    for path in ("/runs?before=x", "/activity?before=-1", f"/runs/run?before={2**70}", "/devices?after=%00"):
        assert browser.get(path).status == 400, path
    assert browser.get("/runs/run/rounds/9").status == 404
    assert browser.get("/static/../app.py").status == 404


def messages(browser: Browser, num: int, last_id: str = "") -> list[tuple[str, str, dict[str, object]]]:
    """Return the first messages of the stream: kind, id, data."""
    found: list[tuple[str, str, dict[str, object]]] = []
    with closing(browser._connection()) as connection:
        connection.request("GET", "/stream", headers={"Last-Event-ID": last_id} if last_id else {})
        response = connection.getresponse()
        assert response.status == 200
        fields: dict[str, str] = {}
        while len(found) < num:
            line = response.readline().decode().rstrip("\n")
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif "event" in fields:
                found.append((fields["event"], fields.get("id", ""), json.loads(fields["data"])))
                fields = {}
    return found


def test_the_stream_resumes_and_starts_anew_after_a_restart(served: PageSite) -> None:
    browser = served.browser()
    hello = messages(browser, 1)[0]
    assert hello[0] == "hello"
    boot = str(hello[2]["boot"])
    browser.login(served.operator_token)
    token = browser.form_token("/runs/run")
    for what in ("pause", "resume"):
        fields = {"what": what, "command_id": f"stream-{what}", "form_token": token}
        assert browser.post("/runs/run/commands", fields).status == 303
    kinds = messages(browser, 3, f"{boot}-0")
    assert [kind for kind, _, _ in kinds] == ["hello", "event", "event"]
    assert kinds[1][1].startswith(f"{boot}-")
    (_, _, following) = messages(browser, 2, kinds[1][1])[1]
    assert following == kinds[2][2]
    with served.site.operator() as operator:
        first = next(iter(operator.watch("run")))
    assert (kinds[1][2]["sequence"], kinds[1][2]["time"]) == (first.sequence, first.time)
    # Positions of another life, and texts that are none.
    for last_id in ("ffffffff-1", "x", f"{boot}-x"):
        assert messages(browser, 2, last_id)[1][0] == "reset"


def test_a_page_for_other_machines_has_tls_and_needs_a_session(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with ExitStack() as stack:
        stack.callback(site.close)
        page = serve(site, "--web", "0.0.0.0:0")
        assert page.url.startswith("https://127.0.0.1:")
        browser = page.browser()
        browser.context = ssl.create_default_context(cadata=site.ca.decode())
        assert browser.get("/runs").headers["location"] == "/login?next=/runs"
        assert browser.get("/readyz").status == 200
        assert browser.login(page.operator_token).headers["set-cookie"].endswith("; Secure")
        assert browser.get("/runs").status == 200
        # A session survives a restart of the coordinator.
        page.running.process.terminate()
        assert page.running.wait(20) == 0
        again = serve(site, "--web", f"0.0.0.0:{browser.port}")
        assert again.browser().port == browser.port
        assert browser.get("/runs").status == 200
