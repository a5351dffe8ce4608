"""``fanin privacy``: the plan of a privacy budget. It needs no coordinator."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fanin.commands.administration.verbs import Verbs, run_verb
from fanin.commands.console.tables import print_tables
from fanin.commands.console.terminal import JsonOption, prints_text, write_json
from fanin.commands.console.usage import WrongUsage, wrong_usage
from fanin.protos.texts import counted
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
    verbs: Verbs = {"plan": plan}
    return run_verb("privacy", "Plan the privacy budget of a Run.", verbs, argv)


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
