"""The ratchet: no change may make a figure worse than its record by more than the figure's noise.

    make bench                                  # all figures, in 8 minutes on a quiet machine
    make bench ARGS="--only rounds --only fold"
    make bench ARGS="--record"                  # write the figures of the current commit to benchmarks/records.json
    python benchmarks/ratchet.py --from FILE    # judge the samples that --json has written

The recorded commit is checked out to a clone of its own and measured again, in turn with the working tree and with the
same environment. So a slower machine slows both. The recorded figures themselves are shown, and decide nothing.

Exit status: 0 if no figure is worse, 1 if one is, 2 for wrong usage or a failed measurement, 3 without a verdict
because the machine was too busy.
"""

import argparse
import difflib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from figures import FIGURES, MEASUREMENTS, Figure, calibration_s

ROOT: Final = Path(__file__).parents[1]
RECORDS: Final = ROOT / "benchmarks" / "records.json"
SOURCE_ROOTS: Final = ("server", "clients", "edge", "datacenter", "protos")
MAX_LOAD: Final = 0.5
"""Running processes for each processor, before the measurement. A quiet machine has less than 0.2."""
MAX_SPREAD: Final = 0.3
"""How much longer than their median the slowest tenth of the calibration loops may take."""
NUM_LOOPS: Final = 50
"""Loops before each run, 0.3 s. The first one is slow also on a quiet machine, and is less than a tenth of them."""
WORSE, FAILED, BUSY = 1, 2, 3


class Failure(Exception):
    """The benchmark cannot go on. The message is for its user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of one figure, in the order of the runs; a pair was measured in turn."""

    record: list[float] = field(default_factory=list)
    now: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All samples, and how busy the machine was.

    Attributes:
        commit: The recorded commit; of a new record, the measured one.
        load: Running processes for each processor before the first run.
        loop_seconds: The calibration loops before each run.
        figures: The samples by figure.
    """

    commit: str
    load: float
    loop_seconds: list[float] = field(default_factory=list)
    figures: dict[str, Samples] = field(default_factory=dict)

    def busy_reason(self) -> str:
        """Return why no verdict is possible, or "" on a quiet machine."""
        if self.load > MAX_LOAD:
            return (
                f"{self.load:.1f} processes ran on each processor before the measurement, expected {MAX_LOAD} or fewer"
            )
        loops_s = sorted(self.loop_seconds)
        slow_s = loops_s[len(loops_s) * 9 // 10] if loops_s else 0.0
        spread = slow_s / statistics.median(loops_s) - 1.0 if loops_s else 0.0
        if spread > MAX_SPREAD:
            return f"a tenth of the calibration loops took {spread:.0%} longer than most, expected {MAX_SPREAD:.0%}"
        return ""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark. Return its exit status."""
    options = _parser().parse_args(argv)
    try:
        return _run(options)
    except Failure as exc:
        sys.stderr.write(f"ratchet: {exc}\n")
        return FAILED


def _run(options: argparse.Namespace) -> int:
    names = options.only or list(MEASUREMENTS)
    for name in names:
        if name not in MEASUREMENTS:
            (nearest, *_) = difflib.get_close_matches(name, MEASUREMENTS, n=1, cutoff=0.0)
            raise Failure(f"--only: got {name!r}, expected one of {', '.join(MEASUREMENTS)}; did you mean {nearest!r}?")
    if options.record:
        return _record(names, options)
    records, failures = _read(RECORDS), list[Failure]()
    if options.source:
        measured = _measured_of(_read(Path(options.source)), options.source)
    else:
        measured = _new(str(records["commit"]), options)
        with _clone(measured.commit) as clone:
            failures = _measure(measured, names, {"record": clone, "now": ROOT})
    if options.json:
        Path(options.json).write_text(json.dumps(asdict(measured), indent=1) + "\n")
    recorded = records["figures"]
    assert isinstance(recorded, Mapping), "a test holds the form of the records"
    sys.stdout.write(table(measured.figures, recorded))
    if failures:
        raise Failure("; ".join(map(str, failures)))
    if reason := measured.busy_reason():
        sys.stdout.write(f"no verdict: this machine is too busy: {reason}; stop other programs, and repeat\n")
        return BUSY
    worse = [name for name, samples in measured.figures.items() if _worsening(name, samples) > FIGURES[name].noise]
    commit = measured.commit[:12]
    sys.stdout.write(f"worse than {commit}: {', '.join(worse)}\n" if worse else f"nothing is worse than {commit}\n")
    return WORSE if worse else 0


def _record(names: Sequence[str], options: argparse.Namespace) -> int:
    if _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!benchmarks/{RECORDS.name}"):
        raise Failure("--record: the working tree has changes, expected those of a commit; commit them first")
    measured = _new(_git("rev-parse", "HEAD"), options)
    if reason := measured.busy_reason():
        sys.stdout.write(f"a record of a busy machine ({reason}); record it again on a quiet one\n")
    if failures := _measure(measured, names, {"now": ROOT}):
        raise Failure("; ".join(map(str, failures)))
    figures = _read(RECORDS)["figures"] if RECORDS.exists() else {}
    assert isinstance(figures, dict), "a test holds the form of the records"
    figures |= {name: statistics.median(samples.now) for name, samples in measured.figures.items()}
    row = {"commit": measured.commit, "load": measured.load, "processors": os.cpu_count()}
    row["figures"] = {name: round(figures[name], 4) for name in FIGURES if name in figures}
    RECORDS.write_text(json.dumps(row, indent=1) + "\n")
    sys.stdout.write(table(measured.figures, figures))
    return 0


def _new(commit: str, options: argparse.Namespace) -> Measured:
    """Return the samples before the first run. A busy machine ends the benchmark before it costs minutes."""
    loops_s = [calibration_s() for _ in range(NUM_LOOPS)]
    measured = Measured(commit=commit, load=os.getloadavg()[0] / (os.cpu_count() or 1), loop_seconds=loops_s)
    if not options.anyway and (reason := measured.busy_reason()):
        sys.stdout.write(f"no verdict: this machine is too busy: {reason}; stop other programs, or add --anyway\n")
        raise SystemExit(BUSY)
    return measured


def _measure(measured: Measured, names: Sequence[str], trees: Mapping[str, Path]) -> list[Failure]:
    """Add the samples of these measurements. The trees take turns. Return the failures; what failed has no samples."""
    failures = []
    for name in names:
        try:
            figures = _samples(measured, name, trees)
        except Failure as exc:
            failures.append(exc)
        else:
            measured.figures.update(figures)
    return failures


def _samples(measured: Measured, name: str, trees: Mapping[str, Path]) -> dict[str, Samples]:
    """Return the samples of a measurement by figure. Raises Failure."""
    figures = {key: Samples() for key in MEASUREMENTS[name].figures}
    for number in range(MEASUREMENTS[name].repeats):
        # The first of a pair finds a colder cache, so each tree is the first one in turn.
        for side, tree in sorted(trees.items(), reverse=bool(number % 2)):
            sys.stderr.write(f"{name}: run {number + 1} of {MEASUREMENTS[name].repeats}, {side}\n")
            loops_s = [calibration_s() for _ in range(NUM_LOOPS)]
            measured.loop_seconds.extend(loops_s)
            report = _report(tree, MEASUREMENTS[name].words)
            for key, figure in MEASUREMENTS[name].figures.items():
                getattr(figures[key], side).append(figure.read(report, statistics.median(loops_s)))
    return figures


def _report(tree: Path, words: Sequence[str]) -> Mapping[str, object]:
    """Run a command of Python with the sources of a tree. Return its report."""
    with tempfile.TemporaryDirectory(prefix="fanin-ratchet-") as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, *words, "--json", str(out)]
        roots = os.pathsep.join(str(tree / root) for root in SOURCE_ROOTS)
        environment = os.environ | {"PYTHONPATH": roots, "OMP_NUM_THREADS": "1"}
        completed = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        # Some benchmarks end with status 1 because a gate is missed.
        if not out.exists():
            # The last line of one of our errors is its code, and the line before it the message.
            lines = completed.stderr.strip().splitlines()[-2:] or ["no output"]
            raise Failure(f"{' '.join(words)} ended with status {completed.returncode} in {tree}: {'; '.join(lines)}")
        report: Mapping[str, object] = json.loads(out.read_text())
        return report


@contextmanager
def _clone(commit: str) -> Iterator[Path]:
    """Provide a clone at a commit. It has the environments of this tree."""
    with tempfile.TemporaryDirectory(prefix="fanin-record-") as folder:
        clone = Path(folder) / "fanin"
        _git("clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(clone))
        try:
            _git("-C", str(clone), "checkout", "--quiet", commit)
        except Failure as exc:
            raise Failure(
                f"{RECORDS.name}: commit {commit[:12]} is not in this repository ({exc}); fetch it (git fetch "
                "--unshallow), or write a new record with --record"
            ) from exc
        for path in ROOT.glob(".venv*"):
            (clone / path.name).symlink_to(path)
        # A first import that compiles would slow every start of a process.
        subprocess.run([sys.executable, "-m", "compileall", "-q", *SOURCE_ROOTS], cwd=clone, check=True)
        yield clone


def _git(*words: str) -> str:
    completed = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise Failure(f"git {words[0]}: {(completed.stderr.strip().splitlines() or ['failed'])[-1]}")
    return completed.stdout.strip()


def table(figures: Mapping[str, Samples], recorded: Mapping[str, float]) -> str:
    """Return a row for each figure: gate, recorded figure, medians of both trees, worsening, noise, verdict."""
    rows = [("", "gate", "recorded", "record", "now", "worse by", "noise", "")]
    for name, samples in figures.items():
        figure, now = FIGURES[name], statistics.median(samples.now)
        gate = "" if figure.gate is None else f"{'>=' if figure.is_speed else '<='} {figure.gate:g}"
        worsening, words = _worsening(name, samples), []
        if worsening > figure.noise:
            words.append("WORSE")
        if not figure.passes(now):
            words.append("misses its gate")
        before = f"{statistics.median(samples.record):.3g}" if samples.record else ""
        known = f"{recorded[name]:.3g}" if name in recorded else ""
        change = f"{worsening:+.0%}" if samples.record else ""
        row = (f"{name}: {figure.what}", gate, known, before, f"{now:.3g}", change, f"{figure.noise:.0%}")
        rows.append((*row, ", ".join(words)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )
    return "".join(lines)


def _worsening(name: str, samples: Samples) -> float:
    """Return by how much the median pair of runs is worse now; 0.0 without a pair."""
    figure: Figure = FIGURES[name]
    pairs = [figure.worsening(now, before) for before, now in zip(samples.record, samples.now, strict=False)]
    return statistics.median(pairs) if pairs else 0.0


def _read(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise Failure(f"{path}: cannot be read ({exc}); expected the JSON of a record or of --json") from exc
    if not isinstance(content, dict) or not {"commit", "figures"} <= content.keys():
        raise Failure(f"{path}: got no commit and figures, expected the JSON of a record or of --json")
    return content


def _measured_of(content: Mapping[str, object], source: str) -> Measured:
    try:
        figures = {name: Samples(**samples) for name, samples in dict(content["figures"]).items()}
        measured = Measured(**{**content, "figures": figures})
    except (TypeError, ValueError) as exc:
        raise Failure(f"{source}: is not a file of --json ({exc})") from exc
    if unknown := sorted(figures.keys() - FIGURES.keys()):
        raise Failure(f"{source}: got figures {', '.join(unknown)}, expected some of {', '.join(FIGURES)}")
    return measured


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help=", ".join(MEASUREMENTS))
    parser.add_argument("--record", action="store_true", help="write the figures of the current commit")
    parser.add_argument("--anyway", action="store_true", help="measure on a busy machine, too")
    parser.add_argument("--from", dest="source", default="", metavar="FILE", help="judge these samples")
    parser.add_argument("--json", default="", metavar="FILE", help="write all samples")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
