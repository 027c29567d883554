"""Settings for your own data, tried on validation users within a budget of time; test users are never used."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import shlex
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

from fedrecon._src.app.plots import write_figure
from fedrecon._src.core.checks import require
from fedrecon._src.core.display import Say, lay_out, silent
from fedrecon._src.data import Ratings
from fedrecon._src.recommend.config import (
    DEFAULT,
    Config,
    ConfigError,
    Rule,
    change_settings,
    check_choice,
    check_config,
    enforce,
    get_setting,
    is_default,
    to_json,
)
from fedrecon._src.recommend.default_training import prepare_training, train_algorithm
from fedrecon._src.recommend.protection import protect
from fedrecon._src.recommend.recipe import build_layout, make_evaluator
from fedrecon._src.recommend.stopping import rounds_of
from fedrecon._src.recommend.task import Measure, Table, metric_cells
from fedrecon._src.recommend.tasks import build_algorithm, task_of
from fedrecon._src.simulation.divergence import DivergenceWarning
from fedrecon._src.simulation.training import RecordCallback
from fedrecon._src.storage.atomic import StorageError, without_nan, write_bytes, write_json
from fedrecon._src.storage.ownership import lock_tuning

TRIALS = "trials.json"
PRIVATE_TRIALS = "privacy: every trial has the noise of a private run; the budget covers that one run, not the search"
CHECKS = 4  # evaluations of a trial; after each it may be stopped

# What is tried, by the path of the setting: values to choose from, or the ends of a range, searched in logarithms.
SPACES: Mapping[str, Mapping[str, Any]] = {
    "ratings": {
        "model.dim": (4, 8, 16, 32),
        "model.prior": [20.0, 2000.0],
        "model.implicit_prior": [0.2, 50.0],
        "model.item_traits": (True, False),
        "reconstruct.ridge": [0.3, 3.0],
        "server.learning_rate": [0.003, 0.05],
        "rounds": (100, 200, 400),
    },
    "clicks": {
        "model.dim": (32, 64, 128, 256),
        "model.unobserved": [0.05, 2.0],
        "model.prior": [0.3, 100.0],
        "server.learning_rate": [0.003, 0.05],
        "rounds": (30, 60, 120),
    },
}


@dataclass(frozen=True)
class Trial:
    """Settings that were tried.

    Attributes:
      values: `{path of the setting: value}`.
      value: the RMSE, or for clicks the NDCG@100, on the validation users, of the model that training would keep; not
        finite if it diverged.
      finished: whether it was trained to its end; others fell behind, or the time was up.

    Example:
      >>> import fedrecon as fr
      >>> fr.recommend.Trial({"model.dim": 8}, value=0.9, finished=True).values
      {'model.dim': 8}
    """

    values: Mapping[str, Any]
    value: float
    finished: bool


@dataclass(frozen=True)
class Tuned:
    """What tuning found.

    Attributes:
      config: the best settings.
      trials: all that were tried; the first has the settings that tuning began with.
      baselines: how the baselines do on the same query of the validation users.
      interrupted: whether it was stopped before its time was over.
      first: what the settings of the first trial are called.

    Example:
      >>> import fedrecon as fr
      >>> tuned = fr.recommend.tune("ratings.csv", trials=10)  # doctest: +SKIP
      >>> tuned.best.value, len(tuned.trials)  # doctest: +SKIP
    """

    config: Config
    trials: tuple[Trial, ...]
    baselines: Table
    interrupted: bool = False
    first: str = "default settings"

    @property
    def failed(self) -> str | None:
        """Why there are no usable settings: training failed in every trial. None if it did not."""
        if math.isfinite(self.best.value):
            return None
        return f"validation users diverged, or had no figure, in all {len(self.trials)} trials"

    @property
    def goal(self) -> Measure:
        """What was looked at."""
        return task_of(self.config).goal

    @property
    def best(self) -> Trial:
        """The best trial of those that were finished."""
        return _best(self.trials, self.goal)


def seconds_of(budget: str) -> float:
    """Return a time such as 90s, 5m or 1.5h in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", budget.strip())
    if match is None or not 0 < float(match[1]) < math.inf:
        raise ConfigError("budget", budget, "must be a duration such as 90s, 5m or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def tune(
    config: Config | str,
    *,
    budget: str | float = "5m",
    trials: int | None = None,
    folder: str | Path | None = None,
    say: Say = lambda text: None,
) -> Tuned:
    """Find settings for ratings or clicks by trying them on validation users.

    The first trial has the settings as they are. Those that follow are proposed by optuna, and stopped early if they
    do worse than others did at the same point. The more settings are tried on few users, the more the best owe to luck:
    believe the figure on test users, which `fedrecon train` reports for the settings found.

    Args:
      config: ratings to train on, or the settings of the first trial.
      budget: how long, as text or in seconds; at least one trial is finished.
      trials: at most this many trials.
      folder: where `config.json`, `trials.json`, `report.md` and a picture go; nothing is written by default.
      say: called with a sentence on every trial.

    Raises:
      ImportError: optuna is not installed.
      ConfigError: the settings are invalid, or nothing can be tuned around them.
      StorageError: the folder holds something else, or the results of an earlier tuning.

    Example:
      >>> import fedrecon as fr
      >>> tuned = fr.recommend.tune("ratings.csv", budget="5m")  # doctest: +SKIP
      >>> tuned.best.values  # doctest: +SKIP
    """
    optuna = require("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    length = seconds_of(budget) if isinstance(budget, str) else float(budget)
    if isinstance(config, str):
        config = change_settings(DEFAULT, {"data.source": config})
    check_choice("task", check_config(config).task, SPACES, " to be tuned")
    without = not getattr(config.model, "round_zero", True)
    rules = (
        Rule(without, "model.round_zero", "must be on: tuning tries settings around --preset default"),
        Rule(not config.rounds, "rounds", "must be at least 1: tuning compares trained models"),
    )
    enforce(rules, config)
    task = task_of(config)
    ratings = task.load(config, silent)
    bench, ready = _Bench(config, ratings, time.monotonic() + length), prepare_training(config, ratings)
    enforce([Rule(not len(ready.users.valid), "data.fractions", "must set aside validation users to tune on")], config)
    # A folder that cannot be written to is noticed before anything is tried.
    with contextlib.nullcontext() if folder is None else lock_tuning(Path(folder)):
        if folder is not None and (Path(folder) / TRIALS).exists():
            raise StorageError(f"{folder} already contains tuning results; choose another folder")
        for remark in (*ready.remarks, *([PRIVATE_TRIALS] if config.privacy.on else [])):
            say(remark)
        first = {path: get_setting(ready.config, path) for path in SPACES[config.task]}  # some are found in the data
        tried, interrupted = _search(optuna, bench, first, trials, say)
        users = None if config.privacy.on else ready.users
        baselines = task.baselines(ready.config, ready.legend, users, ready.users.valid)
        best = change_settings(config, _best(tried, task.goal).values)
        tuned = Tuned(best, tuple(tried), baselines, interrupted, _called(config))
        if folder is not None:
            write_tuned(tuned, Path(folder))
    return tuned


def _search(
    optuna: Any, bench: _Bench, first: Mapping[str, Any], trials: int | None, say: Say
) -> tuple[list[Trial], bool]:
    """Try settings until the time is over, the given ones first; also say whether it was interrupted before that."""
    config, goal, spaces = bench.config, task_of(bench.config).goal, SPACES[bench.config.task]
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=config.seed, n_startup_trials=6),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
    study.enqueue_trial({path: _within(spaces[path], value) for path, value in first.items()})
    ranges = {path: _distribution(optuna.distributions, space) for path, space in spaces.items()}
    tried: list[Trial] = []
    try:
        while not tried or (len(tried) != trials and time.monotonic() < bench.deadline):
            trial = study.ask(ranges)
            values = trial.params if tried else first  # which may be outside of the ranges
            try:
                ended = study.tell(trial, bench.measure(values, trial, optuna.TrialPruned))
            except optuna.TrialPruned:
                ended = study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            error = math.inf if ended.value is None else ended.value
            tried.append(Trial(values, goal.sign * error, ended.state.name == "COMPLETE"))
            is_best = _best(tried, goal) is tried[-1]
            ending = ", the best so far" if is_best else "" if tried[-1].finished else ", stopped early"
            what = in_words(values) if trial.number else _called(config)
            say(f"trial {len(tried)}: {goal.title} {tried[-1].value:.4f}{ending} ({what})")
    except KeyboardInterrupt:
        if not tried:
            raise
        return tried, True  # what was found until then is kept
    return tried, False


def _best(trials: Sequence[Trial], goal: Measure) -> Trial:
    """Return the best trial of those that were finished, as the first always is."""
    return min((trial for trial in trials if trial.finished), key=lambda trial: goal.sign * trial.value)


@dataclass(frozen=True)
class _Bench:
    """Data, how settings do on it, and until when they are tried."""

    config: Config
    ratings: Ratings
    deadline: float

    def measure(self, values: Mapping[str, Any], trial: Any, pruned: type[Exception]) -> float:
        """Train as `fedrecon train` does with some settings and return the error of what it would keep, or give up.

        That is the error on the validation users, by as many divisions of their ratings as training judges by.
        """
        config = change_settings(self.config, values)
        config = dataclasses.replace(config, evaluate_every=max(1, config.rounds // CHECKS))
        ready = prepare_training(config, self.ratings)
        protection = protect(ready)
        ready = ready._replace(config=protection.config)
        algorithm = build_algorithm(ready.config, ready.model, protection.examples, protection.aggregator)
        jax_layout = build_layout(config, algorithm.model)
        goal, most = task_of(config).goal, rounds_of(config, ready.users)

        def watch(record: dict[str, Any]) -> None:
            now = record["round"]
            if record["kind"] != "evaluation" or now in (0, most):
                return
            if now < config.rounds:  # later ones have a smaller prior than others had at the same point
                trial.report(_error(record, goal), round(CHECKS * now / config.rounds))
            late = trial.number and time.monotonic() > self.deadline
            if late or (now < config.rounds and trial.should_prune()):
                raise pruned

        evaluator = make_evaluator(config, algorithm, ready.users, jax_layout)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DivergenceWarning)  # settings are tried to find out which diverge
            options: dict[str, Any] = {"ledger": protection.ledger, "callbacks": [RecordCallback(watch)]}
            run = train_algorithm(ready, algorithm, evaluator, layout=jax_layout, **options)
        if run.interrupted:
            raise KeyboardInterrupt
        best = run.rounds if run.best is None else run.best
        evaluations = (record for record in run.history if record["kind"] == "evaluation")
        return _error(next(record for record in evaluations if record["round"] == best), goal)


def _error(record: Mapping[str, Any], goal: Measure) -> float:
    """Return the number to minimise."""
    value = record["micro"][goal.name]
    return goal.sign * value if record["diverged"] == 0 and math.isfinite(value) else math.inf


def _distribution(distributions: Any, space: Any) -> Any:
    if isinstance(space, tuple):
        return distributions.CategoricalDistribution(space)
    return distributions.FloatDistribution(*space, log=True)


def _called(first: Config) -> str:
    return "default settings" if is_default(first) else "settings as given"


def in_words(values: Mapping[str, Any]) -> str:
    """Write settings as options have them."""
    texts = {path: str(v).lower() if isinstance(v, bool) else f"{v:.3g}" for path, v in values.items()}
    return ", ".join(f"{path.replace('_', '-')} {text}" for path, text in texts.items())


def _within(space: Any, value: Any) -> Any:
    """Return a value, or the nearest that may be tried."""
    if isinstance(space, tuple):
        return min(space, key=lambda choice: abs(choice - value))
    return min(max(value, space[0]), space[1])


# ---- results ----


def what_mattered(tuned: Tuned) -> dict[str, float]:
    """Return how strongly each setting correlates with what is tuned for, from 0 to 1, the strongest first.

    It is the absolute rank correlation over the finished trials; a hint, not a proof.
    """
    done = [trial for trial in tuned.trials if trial.finished and math.isfinite(trial.value)]
    if len(done) < 4:
        return {}
    strength = {}
    for path in SPACES[tuned.config.task]:
        values = [float(trial.values[path]) for trial in done]
        varied = len(set(values)) > 1 and len({trial.value for trial in done}) > 1
        strength[path] = abs(float(spearmanr(values, [trial.value for trial in done])[0])) if varied else 0.0
    return dict(sorted(strength.items(), key=lambda item: -item[1]))


def command_of(tuned: Tuned, folder: Path) -> str:
    """Return the command that trains with the settings found."""
    return shlex.join(["fedrecon", "train", "--config", str(folder / "config.json"), "--out", "runs/tuned"])


def write_tuned(tuned: Tuned, folder: Path) -> None:
    """Write settings, trials, a report and a picture of what mattered."""
    if tuned.failed is None:
        write_bytes(folder / "config.json", (json.dumps(to_json(tuned.config), indent=2) + "\n").encode())
    write_json(folder / TRIALS, without_nan([dataclasses.asdict(trial) for trial in tuned.trials]))
    _draw(tuned, folder / "what_mattered.png")
    write_bytes(folder / "report.md", report(tuned, folder).encode())


def compared(tuned: Tuned) -> Table:
    """Return rows of a table: the best settings, those of the first trial, the baselines."""
    values = {"best settings": tuned.best.value, tuned.first: tuned.trials[0].value}
    rows = {name: {tuned.goal.name: value} for name, value in values.items()}
    return {**rows, **{f"baseline: {name}": row for name, row in tuned.baselines.items()}}


def report(tuned: Tuned, folder: Path) -> str:
    """Summarize the trials."""
    best, goal = tuned.best, tuned.goal
    lines = ["# Tuning", "", f"Data: {tuned.config.data.source}. {goal.title} on validation users:", "", "```text"]
    lines += [*lay_out(metric_cells([goal], compared(tuned)), right=True), "```", ""]
    if tuned.failed is not None:
        lines += [f"Tuning failed: {tuned.failed}. There are no settings to train with.", ""]
    else:
        lines += [f"Best: {in_words(best.values)}.", "", f"Train with them: `{command_of(tuned, folder)}`", ""]
        lines += ["They were chosen on these users, so test users are likely to be served a little worse.", ""]
    if mattered := what_mattered(tuned):
        ranking = ", ".join(f"{path.replace('_', '-')} {value:.2f}" for path, value in mattered.items())
        lines += [f"What went with it (rank correlation): {ranking}.", "", "![](what_mattered.png)", ""]
    done = sum(trial.finished for trial in tuned.trials)
    lines += [f"{len(tuned.trials)} trials, {done} of them finished; `trials.json` has all of them.", ""]
    return "\n".join(lines)


def _draw(tuned: Tuned, path: Path) -> None:
    """Plot what is tuned for against every setting."""
    from matplotlib.figure import Figure

    done, goal = [trial for trial in tuned.trials if math.isfinite(trial.value)], tuned.goal
    spaces = SPACES[tuned.config.task]
    columns = math.ceil(len(spaces) / 2)
    figure = Figure(figsize=(3 * columns, 5.5), layout="constrained")
    figure.suptitle(f"{goal.title} on validation users; hollow: stopped early")
    faces = ["tab:blue" if trial.finished else "none" for trial in done]
    for panel, (name, space) in enumerate(spaces.items(), 1):
        axes = figure.add_subplot(2, columns, panel)
        axes.set(xlabel=name.replace("_", "-"), xscale="log" if isinstance(space, list) else "linear")
        axes.grid(alpha=0.25)
        points = [float(trial.values[name]) for trial in done], [trial.value for trial in done]
        axes.scatter(*points, facecolors=faces, edgecolors="tab:blue")
    write_figure(figure, path)
