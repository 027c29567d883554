"""The paper's claims as functions of results. The text that a report prints names every threshold."""

from __future__ import annotations

from studies.numbers import Measured, Spread, measured
from studies.study import Results

Verdict = tuple[bool, str]
MATCHES = 0.02  # the paper prints results within 2 % of each other in bold together
MUCH_WORSE = 0.10
MOST = 0.75
NOTHING = 0.05


def numbers(name: str, found: Measured) -> str:
    """Write down what was measured."""
    diverged = f", {found.diverged:.1f} of {found.users} users diverged" if found.diverged else ""
    figures = f"RMSE {found.rmse.mean:.3f}, accuracy {found.accuracy.mean:.1f} %"
    after = f" after {found.rounds} rounds" if found.rounds > 1 else ""
    return f"{name}: {figures}{after}{diverged}"


def ratio(value: Spread, other: Spread) -> float:
    """Divide two means; NaN if the other is 0, and then no claim holds."""
    return value.mean / other.mean if other.mean else float("nan")


def matches(challenger: Measured, other: Measured, names: tuple[str, str]) -> Verdict:
    """Tell whether RMSE and accuracy are at most 2 % worse than those of the other."""
    worse = ratio(challenger.rmse, other.rmse) - 1
    fewer = 1 - ratio(challenger.accuracy, other.accuracy)
    words = (
        f"{numbers(names[0], challenger)}; {numbers(names[1], other)}. The RMSE is {abs(worse):.1%} "
        f"{'higher' if worse > 0 else 'lower'}; to match is to be at most {MATCHES:.0%} worse in both."
    )
    return worse <= MATCHES and fewer <= MATCHES, words


def much_worse(loser: Measured, other: Measured, names: tuple[str, str], aside: str = "") -> Verdict:
    """Tell whether one's RMSE is more than 10 % higher than the other's."""
    worse = ratio(loser.rmse, other.rmse) - 1
    words = (
        f"{numbers(names[0], loser)}; {numbers(names[1], other)}. "
        f"The RMSE is {abs(worse):.0%} {'higher' if worse > 0 else 'lower'}; much worse is more than {MUCH_WORSE:.0%}."
        f"{' ' if aside else ''}{aside}{'.' if aside else ''}"
    )
    return worse > MUCH_WORSE, words


def recovers_most(few: Measured, base: Measured, what: str) -> Verdict:
    """Tell whether accuracy with few steps is at least three quarters of the base's."""
    share = ratio(few.accuracy, base.accuracy)
    words = (
        f"{numbers(what, few)}; {numbers('the base', base)}. That is {share:.0%} of the accuracy; most is {MOST:.0%}."
    )
    return share >= MOST, words


def gives_nothing(none: Measured, base: Measured, what: str) -> Verdict:
    """Tell whether accuracy is at most a twentieth of the base's."""
    share = ratio(none.accuracy, base.accuracy)
    words = (
        f"{numbers(what, none)}; {numbers('the base', base)}. "
        f"That is {share:.1%} of the accuracy; nothing is at most {NOTHING:.0%}."
    )
    return share <= NOTHING, words


def cost_little(variants: dict[str, Measured], base: Measured) -> Verdict:
    """Tell whether no variant has an RMSE more than 2 % above that of the base."""
    costs = {name: ratio(found.rmse, base.rmse) - 1 for name, found in variants.items()}
    parts = [f"{numbers(name, found)}, {costs[name]:+.1%} in RMSE" for name, found in variants.items()]
    words = f"{'; '.join(parts)}; {numbers('the base', base)}. Little is at most {MATCHES:.0%}."
    return all(cost <= MATCHES for cost in costs.values()), words


def helps(variant: Measured, base: Measured, names: tuple[str, str]) -> Verdict:
    """Tell whether RMSE is lower and accuracy higher, RMSE by more than its spread over seeds."""
    gain = base.rmse.mean - variant.rmse.mean
    noise = max(base.rmse.deviation, variant.rmse.deviation)
    words = (
        f"{numbers(names[0], variant)}; {numbers(names[1], base)}. The RMSE is {abs(gain):.3f} "
        f"{'lower' if gain > 0 else 'higher'}; to help is to lower it by more than its spread over seeds ({noise:.3f}) "
        "without a loss of accuracy."
    )
    return gain > noise and variant.accuracy.mean >= base.accuracy.mean, words


def of(results: Results, job: str, measure: str = "recon") -> Measured:
    """Sum up a job at the number of rounds it reports."""
    return measured(results[job], measure)
