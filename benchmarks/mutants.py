"""Mutation test of the export: which wrong decompositions, optimizers and losses the verification refuses.

    PYTHONPATH=tests python benchmarks/mutants.py [--json FILE] [--only TEXT]

Each result of each decomposition of ours, each update and each state of an optimizer, and each loss is replaced by
zero, by twice and by its negative. The traced graphs are then held to eager torch by the code of an export. It must
refuse every mutant but those of ``support.mutants.EQUIVALENT``, which change no result. The exit status is 1 if another
survives.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from support.mutant_forms import form_mutants
from support.mutants import EQUIVALENT, FACTORS, Mutant, loss_mutants, optimizer_mutants, outcome_of

from fanin.edge.export.quiet import quiet_torch


def verdict_of(mutant: Mutant, error: str) -> str:
    """Return ``refused``, ``equivalent`` or ``SURVIVED``."""
    return "refused" if error else "equivalent" if str(mutant) in EQUIVALENT else "SURVIVED"


def rows_of(mutants: Iterable[Mutant]) -> list[dict[str, str | float]]:
    """Verify each mutant. Return one row for each."""
    rows: list[dict[str, str | float]] = []
    for mutant in mutants:
        with quiet_torch():
            outcome = outcome_of(mutant)
        names: dict[str, str | float] = {"kind": mutant.kind, "part": mutant.part, "change": mutant.change}
        rows.append(
            names | {"verdict": verdict_of(mutant, outcome.error), "error": outcome.error, "seconds": outcome.seconds}
        )
        print(f"{rows[-1]['verdict']:10} {mutant}", file=sys.stderr, flush=True)
    return rows


def table_of(rows: list[dict[str, str | float]]) -> str:
    """Return a Markdown table with a column for each change. Parts of one kind with equal verdicts share a row."""
    verdicts = {(row["kind"], row["part"], row["change"]): str(row["verdict"]) for row in rows}
    parts: dict[tuple[str, ...], list[str]] = {}
    for kind, part in dict.fromkeys((str(row["kind"]), str(row["part"])) for row in rows):
        graphs, _, name = part.rpartition(" ") if kind == "decomposition" else ("", "", part)
        outcome = (f"{kind} {graphs}".strip(), *(verdicts[kind, part, change] for change in FACTORS))
        parts.setdefault(outcome, []).append(f"`{name}`")
    lines = [f"| kind | parts | {' | '.join(FACTORS)} |", f"|---|---|{'---|' * len(FACTORS)}"]
    lines += [f"| {kind} | {', '.join(names)} | {' | '.join(outcome)} |" for (kind, *outcome), names in parts.items()]
    return "\n".join(lines)


def main() -> int:
    """Print the table, and the number of mutants with each verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file of the results")
    parser.add_argument("--only", default="", help="run the mutants whose part contains this text")
    arguments = parser.parse_args()
    mutants = [
        mutant
        for mutant in (*form_mutants(), *optimizer_mutants(), *loss_mutants())
        if arguments.only in f"{mutant.kind} {mutant.part}"
    ]
    rows = rows_of(mutants)
    counts = Counter(str(row["verdict"]) for row in rows)
    print(table_of(rows))
    print(dict(counts))
    if arguments.json:
        arguments.json.write_text(json.dumps({"counts": counts, "mutants": rows}, indent=2) + "\n")
    return int(counts["SURVIVED"] > 0)


if __name__ == "__main__":
    sys.exit(main())
