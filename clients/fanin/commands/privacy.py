"""``fanin privacy``: the plan of a privacy budget, which needs no coordinator, and the ledger of a population."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fanin.commands.administration.rows import time_text
from fanin.commands.administration.verbs import Verbs, administrator, run_verb
from fanin.commands.console.streams import printable
from fanin.commands.console.tables import print_tables
from fanin.commands.console.terminal import (
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    ServerOption,
    StateOption,
    TokenOption,
    prints_text,
    write_json,
)
from fanin.commands.console.usage import WrongUsage, wrong_usage
from fanin.commands.control.private import UNIT
from fanin.protos.messages import LedgerRow, LostInterval, PrivacyPopulation
from fanin.protos.texts import CHARGE_DUE, counted, epsilon_text, listed
from fanin.server.privacy.planning import (
    MECHANISMS,
    RELEASED,
    MechanismPlan,
    PrivacyBudget,
    Sampling,
    mechanism_of,
    plan_mechanism,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def main(argv: Sequence[str]) -> int:
    """Run ``fanin privacy``."""
    verbs: Verbs = {"plan": plan, "ledger": ledger, "charge": charge}
    return run_verb("privacy", "Plan a privacy budget, and read what Runs have spent of it.", verbs, argv)


def plan(
    population: Annotated[int, typer.Option("--population", help="Devices of the frozen roster.")],
    cohort: Annotated[int, typer.Option("--cohort", help="Devices of a Round; with coins, their expected number.")],
    rounds: Annotated[int, typer.Option("--rounds", help="Rounds of the Run.")],
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="Budget: epsilon after all Rounds.")] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option("--noise-multiplier", help="Instead of --epsilon: show the epsilon of this noise."),
    ] = None,
    delta: Annotated[
        float | None, typer.Option("--delta", help="Budget: delta; default: a tenth of 1 / population.")
    ] = None,
    sampling: Annotated[
        str,
        typer.Option("--sampling", help="coins: each device takes part by an independent coin. none: claim nothing."),
    ] = "none",
    mechanism: Annotated[
        str, typer.Option("--mechanism", help=f"One of {', '.join(MECHANISMS)}; default: those that a Run can use.")
    ] = "",
    norm_bound: Annotated[
        int, typer.Option("--norm-bound", help="L2 norm of a clipped Update, in steps of the grid.")
    ] = 4096,
    parameters: Annotated[int, typer.Option("--parameters", help="Trained parameters of the model.")] = 1_000_000,
    survivors: Annotated[
        int, typer.Option("--survivors", help="Least number of devices whose noise is in a sum; default: the cohort.")
    ] = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write epsilon over the Rounds, for example FILE.png or FILE.svg.")
    ] = None,
    json: JsonOption = "",
) -> None:
    """Find the noise that each mechanism needs for (epsilon, delta) over the Rounds, or the epsilon of given noise."""
    with wrong_usage():
        budget = PrivacyBudget(
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
            delta=0.1 / max(population, 1) if delta is None else delta,
            num_rounds=rounds,
            cohort=cohort,
            population=population,
            sampling=_sampling(sampling),
            norm_bound=norm_bound,
            num_values=parameters,
            survivors=survivors,
        )
        if mechanism:
            mechanism_of(mechanism)
        if plot is not None:
            from fanin.simulation.data.figures import check_figure_file

            check_figure_file(plot)
    plans = [plan_mechanism(name, budget) for name in ([mechanism] if mechanism else RELEASED)]
    if plot is not None:
        from fanin.simulation.data.figures import save_figure

        save_figure(_figure(plans, budget), plot)
    if json:
        write_json(json, _report(plans, budget))
    if prints_text(json):
        print_tables(*_tables(plans, budget))


def ledger(
    population: Annotated[str, typer.Argument(help="A population; without one, list all.", metavar="POPULATION")] = "",
    last: Annotated[int, typer.Option("--last", min=1, help="List this many of the newest rows.")] = 20,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """List the populations with their budgets, or the rows of the ledger of one. Needs the role viewer."""
    with administrator(state, server, ca, token_file) as client:
        if not population:
            populations = list(client.populations())
            if json:
                write_json(json, {"populations": [population_row(each) for each in populations]})
            if prints_text(json):
                print_tables(_populations_table(populations))
            return
        page = client.ledger_page(population, 1)
        newest = 0 if page.population.newest is None else page.population.newest.number
        rows: list[LedgerRow] = []
        start = 1 if json else max(newest - last + 1, 1)
        while (page := client.ledger_page(population, start)).rows:
            rows += page.rows
            start = page.rows[-1].number + 1
    if json:
        write_json(json, population_row(page.population) | {"rows": [asdict(row) for row in rows]})
    if prints_text(json):
        print_tables(population_text(page.population), _ledger_table(rows[-last:]))


def charge(
    population: Annotated[str, typer.Argument(help="The population.", metavar="POPULATION")],
    rounds: Annotated[
        int, typer.Option("--rounds", min=0, help="Rounds of each Run that the ledger does not have, at least.")
    ],
    run: Annotated[str, typer.Option("--run", help="A Run; default: each Run that waits since a restore.")] = "",
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Charge Rounds that a restored coordinator does not know, so that its Runs continue. Needs the role admin."""
    with administrator(state, server, ca, token_file) as client:
        known = client.ledger_page(population, 1).population
        after = 0 if known.newest is None else known.newest.number
        charged = client.charge(LostInterval(population=population, rounds=rounds, run_id=run, after=after))
    if json:
        write_json(json, population_row(charged))
    if prints_text(json):
        print_tables(population_text(charged))


def population_row(population: PrivacyPopulation) -> dict[str, object]:
    """Return the JSON row of a population."""
    newest = population.newest
    return {
        "population": population.name,
        "budget": population.epsilon,
        "delta": population.delta,
        "size": population.size,
        "begun_by_run": population.run_id,
        "begun_at_s": population.begun_at,
        "epsilon": 0.0 if newest is None else newest.epsilon,
        "epsilon_delta": population.delta if newest is None else newest.delta,
        "num_rows": 0 if newest is None else newest.number,
        "relation": population.relation,
        "is_charge_due": bool(population.uncharged),
        "uncharged_runs": list(population.uncharged),
    }


def population_text(population: PrivacyPopulation) -> str:
    """Return a population with what its Runs have spent as text."""
    newest = population.newest
    due = population.uncharged
    spent = "nothing" if newest is None else f"epsilon {epsilon_text(newest.epsilon)} at delta {newest.delta:g}"
    spent = f"at least {spent} ({CHARGE_DUE})" if due else spent
    lines = [
        f"population {population.name} of at least {counted(population.size, 'device')}",
        f"  budget  epsilon {population.epsilon:g} at delta {population.delta:g}, from run {population.run_id}",
        f"  spent   {spent}",
        f"  claim   {population.relation}; unit: {UNIT}",
    ]
    if population.uncharged:
        waiting = listed(population.uncharged)
        lines.append(f"  waits   lost rounds of run {waiting}: fanin privacy charge {population.name} --rounds N")
    return "\n".join(map(printable, lines))


def _populations_table(populations: Sequence[PrivacyPopulation]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("population", "epsilon", "budget", "delta", "devices", "rows", "waits for a charge"):
        is_text = heading in ("population", "waits for a charge")
        table.add_column(heading, justify="left" if is_text else "right")
    for each in populations:
        newest = each.newest
        table.add_row(
            each.name,
            ("at least " if each.uncharged else "") + ("0" if newest is None else epsilon_text(newest.epsilon)),
            f"{each.epsilon:g}",
            f"{each.delta:g}",
            f"{each.size:,}",
            "0" if newest is None else str(newest.number),
            listed(each.uncharged),
        )
    return table


def _ledger_table(rows: Sequence[LedgerRow]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("row", "time", "run", "round", "count", "epsilon", "delta"):
        table.add_column(heading, justify="left" if heading in ("time", "run") else "right")
    for row in rows:
        table.add_row(
            *(str(row.number), time_text(row.committed_at), row.run_id, str(row.round) if row.round else "lost"),
            *(str(row.count), epsilon_text(row.epsilon), f"{row.delta:g}"),
        )
    return table


def _sampling(name: str) -> Sampling:
    match name:
        case "coins" | "none":
            return name
        case _:
            raise WrongUsage(f"--sampling: got {name!r}, expected coins or none")


def _report(plans: Sequence[MechanismPlan], budget: PrivacyBudget) -> dict[str, object]:
    return {
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "rounds": budget.num_rounds,
        "cohort": budget.cohort,
        "population": budget.population,
        "sampling": budget.sampling,
        "norm_bound_steps": budget.norm_bound,
        "num_parameters": budget.num_values,
        "least_survivors": budget.noise_devices,
        "mechanisms": [
            {
                "mechanism": each.mechanism,
                "summary": MECHANISMS[each.mechanism].summary,
                "sampling_rate": budget.sampling_rate if MECHANISMS[each.mechanism].is_sampled else 1.0,
                "noise_multiplier": each.noise_multiplier,
                "sigma_steps": each.sigma,
                "can_draw": each.can_draw,
                "mean_noise_per_clip": each.mean_noise,
                "epsilon_by_round": [
                    {"round": round_number, "epsilon": value} for round_number, value in each.epsilons
                ],
            }
            for each in plans
        ],
    }


def _tables(plans: Sequence[MechanismPlan], budget: PrivacyBudget) -> tuple[str, Table, str, Table]:
    wanted = f"epsilon {budget.epsilon:g}" if budget.epsilon else f"noise multiplier {budget.noise_multiplier:g}"
    title = (
        f"{wanted} at delta {budget.delta:g} over {counted(budget.num_rounds, 'Round')} of "
        f"{counted(budget.cohort, 'device')} from {budget.population:,}, sampling {budget.sampling}"
    )
    needs = Table(box=None, pad_edge=False)
    for heading in ("mechanism", "what it is", "noise multiplier", "sigma of a draw", "noise of the mean"):
        needs.add_column(heading, justify="left" if heading in ("mechanism", "what it is") else "right")
    for each in plans:
        needs.add_row(
            each.mechanism,
            MECHANISMS[each.mechanism].summary,
            f"{each.noise_multiplier:.3f}",
            f"{each.sigma:,.1f} steps" + ("" if each.can_draw else ": too large"),
            f"{each.mean_noise:.3g} clips",
        )
    spent = Table(box=None, pad_edge=False)
    spent.add_column("Rounds", justify="right")
    for each in plans:
        spent.add_column(each.mechanism, justify="right")
    for rows in zip(*(each.epsilons for each in plans), strict=True):
        spent.add_row(f"{rows[0][0]:,}", *(f"{value:.4f}" for _, value in rows))
    return title, needs, "\nepsilon after", spent


def _figure(plans: Sequence[MechanismPlan], budget: PrivacyBudget) -> "Figure":
    from fanin.simulation.data.figures import new_figure

    figure, axes = new_figure()
    for each in plans:
        rounds, values = zip(*each.epsilons, strict=True)
        axes.plot(rounds, values, marker="o", label=f"{each.mechanism}, noise multiplier {each.noise_multiplier:.3f}")
    if budget.epsilon is not None:
        axes.axhline(budget.epsilon, color="0.5", linestyle="--", label="budget")
    axes.set_xscale("log")
    axes.set_xlabel("Rounds")
    axes.set_ylabel(f"epsilon at delta {budget.delta:g}")
    axes.legend(fontsize="small")
    return figure
