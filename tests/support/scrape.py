"""The metrics of a coordinator, scraped as Prometheus does it, and the programs of Prometheus that check files."""

import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from support.processes import Running, Site, start

WAIT_S = 30.0


@dataclass(frozen=True, repr=False)
class Scrape:
    """One scrape: its text, and its samples."""

    text: str

    @property
    def samples(self) -> Mapping[tuple[str, frozenset[tuple[str, str]]], float]:
        """The values by name and labels."""
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.text)
            for sample in family.samples
        }

    @property
    def names(self) -> frozenset[str]:
        """The names of all samples, and those of metrics without a sample."""
        declared = set(re.findall(r"^# TYPE (\S+) ", self.text, re.MULTILINE))
        histograms = re.findall(r"^# TYPE (\S+) histogram$", self.text, re.MULTILINE)
        parts = {f"{name}_{part}" for name in histograms for part in ("bucket", "count", "sum")}
        return frozenset(declared | parts | {name for name, _ in self.samples})

    def value(self, name: str, **labels: str) -> float:
        """Return the value of a sample. A missing one fails the test."""
        values = {labels: value for (each, labels), value in self.samples.items() if each == name}
        value = values.get(frozenset(labels.items()))
        assert value is not None, f"{name} {labels}: not in {values}"
        return value


def serve(site: Site, *words: str, environment: Mapping[str, str] | None = None) -> Running:
    """Start ``fanin serve`` with a page for a site, and wait until it serves."""
    options = ["--state", str(site.state), "--listen", site.listen, "--web", "127.0.0.1:0", *words]
    log = site.folder / f"serve-{len(site.started)}.log"
    running = start(["-m", "fanin.commands.main", "serve", *options], log, environment)
    site.started.append(running)
    page_url(running)
    site.listen = site.address
    return running


def page_url(running: Running) -> str:
    """Return where the page of a coordinator is."""
    until = time.monotonic() + WAIT_S
    while "page for browsers" not in running.text():
        assert running.process.poll() is None and time.monotonic() < until, running.text()
        time.sleep(0.05)
    return running.text().rpartition("page for browsers")[2].split()[0]


def scrape(url: str) -> Scrape:
    """Return the metrics of the coordinator with this page."""
    with urllib.request.urlopen(f"{url}metrics", timeout=WAIT_S) as reply:
        return Scrape(reply.read().decode())


def scrape_until(url: str, is_done: Callable[[Scrape], bool]) -> Scrape:
    """Scrape until a condition holds."""
    until = time.monotonic() + WAIT_S
    while not is_done(last := scrape(url)):
        assert time.monotonic() < until, last.text
        time.sleep(0.1)
    return last


def promtool(*words: str, given: str = "", folder: Path | None = None) -> str:
    """Return what promtool prints. An error that it reports fails the test."""
    program = shutil.which("promtool")
    assert program is not None, "promtool: not found; install it: apt-get install --no-install-recommends prometheus"
    done = subprocess.run(
        [program, *words], input=given, capture_output=True, text=True, check=False, cwd=folder, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
