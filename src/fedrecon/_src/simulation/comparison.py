"""Compare algorithms: tune and train each of them, and evaluate all on the same unseen clients."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.rounds import upload_groups
from fedrecon._src.algorithms.validation import decide_lookups
from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.display import lay_out, readable
from fedrecon._src.core.model import shapes_of
from fedrecon._src.core.pytrees import flatten, nbytes
from fedrecon._src.core.split import Split
from fedrecon._src.simulation.evaluation import Evaluation, Evaluator, evaluate
from fedrecon._src.simulation.explanation import ID_BYTES, format_size, mean_rows
from fedrecon._src.simulation.training import EarlyStopping, Run, Validation, train

LATEX = str.maketrans({"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "±": r"$\pm$"})


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a method asks of a client.

    Attributes:
      down: bytes that a client receives in a round.
      up: bytes of the changes that it sends; of tables that are read by rows, only the client's rows, each with its id
        (a mean over clients).
      state: bytes that it keeps from round to round, besides its examples.
      steps: steps that it takes in a round, a mean over clients; NaN if the method does not say.
      once: whether the method works where a client takes part only once: it keeps nothing that a later round needs.
    """

    down: float
    up: float
    state: int
    steps: float
    once: bool


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """The result of one method in a comparison; tuples have one entry per seed.

    Attributes:
      algorithm: what was trained, with the best setting.
      setting: that setting; None if there was nothing to choose.
      runs: its trainings; without rounds if the model has nothing global.
      unseen: evaluations on the unseen clients.
      seen: evaluations on later examples of the training clients; empty if they were not asked for.
      costs: bytes, steps, and whether clients must come back.
      seconds: the time of each training, compiling included.
    """

    algorithm: Algorithm
    setting: Any
    runs: tuple[Run, ...]
    unseen: tuple[Evaluation, ...]
    seen: tuple[Evaluation, ...]
    costs: Costs
    seconds: tuple[float, ...]

    def numbers(self, metric: str) -> dict[str, list[float]]:
        """Return what a table shows of one metric, one value per seed.

        Args:
          metric: its name.
        """
        values = {
            "unseen": [evaluation.micro.get(metric, np.nan) for evaluation in self.unseen],
            "worst tenth": [evaluation.worst(0.1).get(metric, np.nan) for evaluation in self.unseen],
        }
        return values | ({"seen": [e.micro.get(metric, np.nan) for e in self.seen]} if self.seen else {})


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Methods side by side; `print` it for a table, or write it as CSV, Markdown or LaTeX. See `compare`.

    Attributes:
      rows: the result of each method, by name.
    """

    rows: dict[str, ComparisonRow]

    def __getitem__(self, name: str) -> dict[str, float]:
        """Return the metrics of one method over all query examples of unseen clients, a mean over seeds."""
        evaluations = [evaluation.micro for evaluation in self.rows[name].unseen]
        return {metric: float(np.mean([micro[metric] for micro in evaluations])) for metric in evaluations[0]}

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics, the loss first."""
        return list(dict.fromkeys(metric for row in self.rows.values() for metric in row.unseen[0].micro))

    def cells(self, metric: str | None = None) -> list[list[str]]:
        """Return the table as text, the header first: means over seeds, and their standard deviation if there are more.

        Args:
          metric: what to show of unseen clients, of the worst tenth of them (those with the highest loss) and of seen
            clients; by default the model's first metric besides the loss.
        """
        metric = metric or self.metrics[min(1, len(self.metrics) - 1)]
        shown = list(dict.fromkeys(name for row in self.rows.values() for name in row.numbers(metric)))
        header = ["", *(f"{name} {metric}" if name == "unseen" else name for name in shown)]
        table = [[*header, "down", "up", "keeps", "steps", "seconds", "once"]]
        for name, row in self.rows.items():
            numbers, costs = row.numbers(metric), row.costs
            diverged = sum(evaluation.diverged for evaluation in row.unseen)
            cells = [
                name if row.setting is None else f"{name} ({row.setting})",
                *(_spread(numbers[column]) if column in numbers else "" for column in shown),
                *map(format_size, (costs.down, costs.up, costs.state)),
                "" if np.isnan(costs.steps) else readable(costs.steps, 3),
                readable(float(np.mean(row.seconds)), 2),
                "yes" if costs.once else "no",
                *([f"({diverged} diverged)"] if diverged else []),
            ]
            table.append(cells)
        return table

    def __str__(self) -> str:
        """Return a table of the first metric and of what methods cost, and on whom it was measured."""
        measured = [row.unseen[0] for row in self.rows.values()]
        clients, examples = max(e.clients for e in measured), max(e.examples for e in measured)
        sizes = f"{clients:,} clients never seen in training, {examples:,} query examples"
        return "\n".join([*lay_out(self.cells(), right=True), sizes])

    def to_markdown(self, metric: str | None = None) -> str:
        """Return the table for Markdown.

        Args:
          metric: as for `cells`.
        """
        header, *rows = self.cells(metric)
        lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

    def to_latex(self, metric: str | None = None) -> str:
        """Return the table for LaTeX, with the rules of the package booktabs.

        Args:
          metric: as for `cells`.
        """
        header, *rows = (" & ".join(cell.translate(LATEX) for cell in line) + r" \\" for line in self.cells(metric))
        columns = "l" + "r" * (len(self.cells(metric)[0]) - 1)
        lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", header, r"\midrule", *rows, r"\bottomrule"]
        return "\n".join([*lines, r"\end{tabular}"]) + "\n"

    def to_csv(self) -> str:
        """Return all metrics and costs as CSV, in full precision: means and standard deviations over seeds."""
        lines = []
        for name, row in self.rows.items():
            line: dict[str, Any] = {"method": name, "setting": row.setting, "seeds": len(row.runs)}
            for metric in self.metrics:
                for group, values in row.numbers(metric).items():
                    column = f"{group} {metric}".replace(" ", "_")
                    line |= {column: np.mean(values), f"{column}_std": _deviation(values)}
            line |= {"diverged": sum(evaluation.diverged for evaluation in row.unseen)}
            lines.append(line | dataclasses.asdict(row.costs) | {"seconds": np.mean(row.seconds)})
        out = io.StringIO()
        writer = csv.DictWriter(out, list(dict.fromkeys(column for line in lines for column in line)))
        writer.writeheader()
        writer.writerows(lines)
        return out.getvalue()


def compare(
    algorithms: Mapping[str, Algorithm | Mapping[Any, Algorithm]],
    clients: Clients,
    unseen: Clients,
    *,
    rounds: int,
    valid: Clients | Validation | None = None,
    seen: Split | None = None,
    split: Split | None = None,
    seeds: Sequence[int] = (0,),
    **training: Any,
) -> Comparison:
    """Train every method on the same clients, and evaluate all on the same query examples of unseen clients.

    A method may use an unseen client's support examples to reconstruct local parameters or to adapt the model. If its
    model has nothing local, it never reads them. If its model has nothing global, there is nothing to train, and it
    runs no rounds.

    Args:
      algorithms: by the names that the table shows: an algorithm, or the same method with several settings, as
        `{setting: algorithm}`. Of these, the one with the lowest loss on `valid` is reported. Every method must have
        equally many settings.
      clients: the clients to train on.
      unseen: the clients to measure on. They take no part in training.
      rounds: rounds of training for each method.
      valid: clients to choose settings on. A `Validation` also evaluates during training, for curves; see the histories
        of the runs.
      seen: how to divide every training client's examples into those that it trains on and later ones, on which it is
        measured: with the local parameters that it keeps, or with those reconstructed from all that it trained on.
        None trains on all examples.
      split: support and query of unseen and validation clients; half and half by default, whatever training does.
      seeds: the seeds to train with. Settings are chosen with the first one.
      **training: other arguments of `train`, such as `clients_per_round`, `layout` and `callbacks`.

    Returns:
      A `Comparison`.

    Raises:
      ValueError: if methods have different numbers of settings, or an unseen client also trains. The latter is only
        noticed if both are views of the same data, such as those that `split_clients` returns.
      KeyboardInterrupt: on Ctrl-C, while any of the algorithms trains.

    Example:
      >>> import optax
      >>> import fedrecon as fr
      >>> def reconstruction(rate):
      ...     steps = fr.gradient_descent(optax.sgd(rate), batch_size=2, steps=2)
      ...     model = fr.models.matrix_factorization(2, 3)
      ...     return fr.federated_reconstruction(model, reconstruct=steps, update=steps, server=optax.sgd(1.0))
      >>> ratings = fr.Clients.from_columns({"item": [0, 1] * 3, "rating": [5.0, 3.0] * 3}, client=[0, 0, 1, 1, 2, 2])
      >>> train, valid, test = (ratings.take([i]) for i in range(3))
      >>> methods = {"reconstruction": {rate: reconstruction(rate) for rate in (0.01, 0.1)}}
      >>> results = fr.compare(methods, train, test, valid=valid, rounds=1)
      >>> results.rows["reconstruction"].costs.up
      16.0
    """
    candidates = _settings_of(algorithms, seeds, valid is not None)
    validation = valid if isinstance(valid, Validation) or valid is None else Validation(valid)
    for held_out, name in ((unseen, "unseen"), (validation and validation.data, "valid")):
        if isinstance(held_out, Clients):
            _check_disjoint(clients, held_out, name)
    earlier, later = (clients, clients) if seen is None else _divide(clients, seen)
    per_round, layout = training.get("clients_per_round"), training.get("layout")
    if isinstance(per_round, int):
        training["clients_per_round"] = min(per_round, len(earlier))

    def train_on(algorithm: Algorithm, seed: int) -> tuple[Run, float]:
        """Train; return the run and how many seconds it took."""
        trains, evaluations = flatten(shapes_of(algorithm.model.init_global))[0], validation
        if validation is not None and isinstance(validation.data, Clients):
            evaluator = Evaluator(algorithm, validation.data, split=split, seed=seed, layout=layout)
            evaluations = dataclasses.replace(validation, data=evaluator)
        start = time.perf_counter()
        run = train(algorithm, earlier, valid=evaluations, seed=seed, rounds=rounds if trains else 0, **training)
        if run.interrupted:
            raise KeyboardInterrupt
        return run, time.perf_counter() - start

    rows = {}
    for name, settings in candidates.items():
        first = {setting: train_on(algorithm, seeds[0]) for setting, algorithm in settings.items()}
        setting = min(first, key=lambda setting: _validation_rank(first[setting][0]))
        algorithm = settings[setting]
        runs, seconds = zip(first[setting], *(train_on(algorithm, seed) for seed in seeds[1:]), strict=True)
        measure = functools.partial(evaluate, algorithm, layout=layout)
        rows[name] = ComparisonRow(
            algorithm=algorithm,
            setting=setting,
            runs=runs,
            unseen=tuple(measure(run.params, unseen, split=split, seed=s) for run, s in zip(runs, seeds, strict=True)),
            seen=()
            if seen is None
            else tuple(
                measure(run.params, later, client_state=run.client_state, protocol="standard")
                if keeps_local(algorithm)
                else measure(run.params, clients, split=seen, seed=seed)
                for run, seed in zip(runs, seeds, strict=True)
            ),
            costs=measure_costs(algorithm, earlier),
            seconds=seconds,
        )
    return Comparison(rows)


def _settings_of(
    algorithms: Mapping[str, Algorithm | Mapping[Any, Algorithm]], seeds: Sequence[int], validates: bool
) -> dict[str, dict[Any, Algorithm]]:
    """Return the algorithms of every method by their setting, equally many for each."""
    settings = {name: dict(a) if isinstance(a, Mapping) else {None: a} for name, a in algorithms.items()}
    counts = {name: len(algorithms) for name, algorithms in settings.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values() or not seeds:
        rule = "must not be empty, with equally many settings each"
        raise ValueError(f"`algorithms` and `seeds` {rule} (got {counts})")
    if not validates and 1 not in counts.values():
        raise ValueError("`valid` is missing: settings are chosen on validation clients")
    return settings


def keeps_local(algorithm: Algorithm) -> bool:
    """Return whether what clients keep are their local parameters, and not something else, such as control variates.

    Args:
      algorithm: the method.
    """
    if algorithm.method.init_client is None:
        return False
    trees = _client_state(algorithm), shapes_of(algorithm.model.init_local)
    paths, local = (list(flatten(tree)[0]) for tree in trees)
    return paths == local


def _client_state(algorithm: Algorithm) -> Any:
    """Return the shapes of what one client keeps; empty if it keeps nothing."""
    return shapes_of(lambda key: algorithm.init_clients(algorithm.init(key), jax.random.split(key, 1)))


def measure_costs(algorithm: Algorithm, clients: Clients) -> Costs:
    """Measure what a method asks of a client, without running it.

    Args:
      algorithm: the method.
      clients: whose rows and steps are counted: rows of at most `SAMPLED`, steps of all.
    """
    algorithm = decide_lookups(algorithm, clients)
    method, key = algorithm.method, jax.random.key(0)
    state = jax.eval_shape(algorithm.init, key)
    rows, uploaded = upload_groups(algorithm, clients)
    counts = mean_rows(clients, method.needs) if rows else {}
    up = 0.0
    for part, path, leaf in uploaded:
        group = rows.get((part, path))
        up += nbytes(leaf) if group is None else (nbytes(leaf) / leaf.shape[0] + ID_BYTES) * counts[group]
    support, query = method.needs.split.counts(clients.sizes)
    steps = np.nan if method.steps is None else float(np.mean(method.steps(support, query)))
    down = nbytes(jax.eval_shape(algorithm.message, state))
    return Costs(down, up, nbytes(_client_state(algorithm)), steps if up else 0.0, method.init_client is None)


def _divide(clients: Clients, split: Split) -> tuple[Clients, Clients]:
    """Return clients with the examples that they train on, and with later ones."""
    if split.pattern is not None or split.by is not None or split.redrawn:
        raise ValueError("`seen` must divide examples in their order, such as `split.fraction(0.8)`; sort them first")
    sides = zip(split.begins(clients.sizes), split.counts(clients.sizes), strict=True)
    views = [(clients.starts + begin, clients.starts + begin + count) for begin, count in sides]
    earlier, later = (dataclasses.replace(clients, starts=start, ends=end, totals=None) for start, end in views)
    return earlier, later


def _validation_rank(run: Run) -> tuple[float, float]:
    evaluations = [entry for entry in run.history if entry["kind"] == "evaluation"]
    return EarlyStopping().rank(evaluations[-1]) if evaluations else (0, 0)  # without any, there is nothing to choose


def _deviation(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f}" + (f" ± {_deviation(values):.3f}" if len(values) > 1 else "")


def _check_disjoint(clients: Clients, held_out: Clients, argument: str) -> None:
    """Fail if some of the held-out clients also train. This is only known if both are views of the same data."""
    if not any(ours is theirs for ours in clients.columns.values() for theirs in held_out.columns.values()):
        return
    both = np.intersect1d(rows_of(clients.starts, clients.ends), rows_of(held_out.starts, held_out.ends)).size > 0
    if clients.names is not None and held_out.names is not None:
        both |= np.intersect1d(clients.names, held_out.names).size > 0
    if both:
        raise ValueError(f"`{argument}` must not contain training clients; divide clients with `split_clients`")
