"""Federated Reconstruction and its relatives on the same unseen people: ratings, next words and classification.

python -m studies relatives --data folder --out study

The folder has `ml-1m.zip`, `blogs.jsonl.gz` and `tweets.jsonl.gz`. Classification is on synthetic data, and so are the
100,000 clients of whom nobody takes part twice; `--only relatives` runs these two alone and reads no files.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedrecon as fr
from fedrecon import algorithms
from fedrecon._src.core.display import Progress, silent
from fedrecon._src.recommend.config import ClickData, ClicksConfig
from fedrecon._src.simulation.comparison import keeps_local, measure_costs
from fedrecon._src.simulation.explanation import format_size
from studies.study import (
    Block,
    Claim,
    Figure,
    Job,
    Kind,
    Result,
    Results,
    Section,
    Spread,
    Study,
    Table,
    as_float,
    missing_jobs,
    spread,
)

# Every method is trained with both, then with a rate beyond the better; the best on validation clients is measured.
RATES = {
    "ratings": (0.03, 0.1),
    "blogs": (1.0, 3.0),
    "tweets": (1.0, 3.0),
    "classes": (0.3, 1.0),
    "once": (0.3, 1.0),
}
TASKS = {
    "ratings": "MovieLens 1M ratings, RMSE",
    "blogs": "Blogs, next word, accuracy",
    "tweets": "Posts of members of Congress, next word, accuracy",
    "classes": "Classification of synthetic data, accuracy",
    "once": "The same with 100,000 clients, each taking part at most once, accuracy",
}
METRIC = {"ratings": "rmse"}  # of other tasks: accuracy
SYNTHETIC = ("classes", "once")  # tasks
SYNTHETIC_ONLY = ("lg_fedavg", "fedbn", "local")  # methods whose models only these tasks have


class Task(NamedTuple):
    """The data and the models of a task.

    Attributes:
      train: the clients to train on, with their earlier examples.
      later: the same clients with later examples.
      everything: the same clients with both.
      valid: other clients, to choose rates on.
      test: other clients, to report.
      split: the model with a local part.
      whole: the same with everything global.
      front: the same with its first layers local, for LG-FedAvg.
      alone: the same with everything local.
      normalized: the same with a normalisation layer, which is local, for FedBN.
      batch_size: examples per step.
      per_round: clients in a round.
      epochs: how often a client goes through its examples to adapt.
      server: the server's optimizer, but for Reptile.
    """

    train: fr.Clients
    later: fr.Clients
    everything: fr.Clients
    valid: fr.Clients
    test: fr.Clients
    split: fr.Model
    whole: fr.Model
    batch_size: int
    per_round: int
    epochs: int = 5
    server: optax.GradientTransformation = optax.sgd(1.0)
    front: fr.Model | None = None
    alone: fr.Model | None = None
    normalized: fr.Model | None = None


SEEN = fr.split.fraction(0.8)  # of a training client's examples; the rest is later


def make_task(train: fr.Clients, valid: fr.Clients, test: fr.Clients, **fields: Any) -> Task:
    """Divide the examples of those who train into earlier and later ones."""
    middle = train.starts + SEEN.counts(train.sizes)[0]
    earlier = fr.Clients(train.columns, train.starts, middle, train.names)
    later = fr.Clients(train.columns, middle, train.ends, train.names)
    return Task(earlier, later, train, valid, test, **fields)


# ---- the tasks ----


def load_ratings(folder: Path) -> Task:
    """MovieLens 1M: a factorization with biases; the user's part is local, or the same for all."""
    ratings = fr.data.load_movielens(folder / "ml-1m.zip").shuffle(seed=0).cap(100)
    model = fr.models.matrix_factorization(ratings.num_items, dim=8, biases=True, init_mean=3.5)
    parts = ratings.split_clients(0.8, 0.1, 0.1, seed=0)
    # A mean over clients moves an item that few of them rated by little, which Adam evens out.
    options: dict[str, Any] = {"batch_size": 10, "per_round": 50, "server": optax.adam(0.03)}
    return make_task(*parts, split=model, whole=all_global(model), **options)


def load_words(folder: Path, name: str) -> Task:
    """Next words: the embeddings of words outside the vocabulary are local, or the same for all."""
    corpus = fr.data.load_text(str(folder / f"{name}.jsonl.gz"))
    parts = [corpus.next_words(part, 1000, 100).cap(64) for part in ("train", "valid", "test")]
    make = functools.partial(fr.models.next_word, 1000, 100, embedding=32, hidden=64, projection=32)
    models: dict[str, Any] = {"split": make(local="oov_embedding"), "whole": make(local="nothing")}
    return make_task(*parts, **models, batch_size=16, per_round=10, epochs=1, server=fr.optimizers.fedyogi(0.02))


def make_classes(num_clients: int, seed: int = 0) -> fr.Clients:
    """Draw clients that name the same things differently.

    An example has 20 standard normal features. Its score for each of 5 classes is linear in 4 hidden features, which
    are tanh of a linear map that all clients share; the map from hidden features to classes is a shared one plus a
    client's own, of equal variance. The label is the class with the highest score, and one label in ten is random. A
    client has 10 to 40 examples.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(10, 41, num_clients)
    body, head = (rng.normal(size=shape).astype(np.float32) for shape in ((20, 4), (4, 5)))
    own = rng.normal(size=(num_clients, 4, 5)).astype(np.float32)
    client = np.repeat(np.arange(num_clients), sizes)
    x = rng.normal(size=(len(client), 20)).astype(np.float32)
    scores = np.einsum("nh,nhc->nc", np.tanh(x @ body / 2), (head + own)[client])
    random = rng.random(len(client)) < 0.1
    label = np.where(random, rng.integers(0, 5, len(client)), scores.argmax(1)).astype(np.int32)
    return fr.Clients.from_columns({"x": x, "label": label}, client=client)


def load_classes(num_clients: int, per_round: int) -> Task:
    """Two layers on synthetic data: the head is local, or the body, or both, or nothing."""

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key)
        normal = jax.nn.initializers.he_normal()
        return {
            "body": {"w": normal(keys[0], (20, 16)), "b": jnp.zeros(16)},
            "head": {"w": normal(keys[1], (16, 5)), "b": jnp.zeros(5)},
        }

    def apply(params: Any, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ params["body"]["w"] + params["body"]["b"])
        return hidden @ params["head"]["w"] + params["head"]["b"]

    def model(local: Any) -> fr.Model:
        return fr.models.from_function(apply, init, local=local, inputs="x", loss="cross_entropy", metrics=["accuracy"])

    parts = make_classes(num_clients).split_clients(0.8, 0.1, 0.1, seed=0)
    models: dict[str, Any] = {
        "split": model("head/*"),
        "whole": model(()),
        "front": model("body/*"),
        "alone": model("*"),
        "normalized": normalized_classes(init),
    }
    return make_task(*parts, **models, batch_size=8, per_round=per_round)


def normalized_classes(init: Callable[[jax.Array], Any]) -> fr.Model:
    """Return the model of `load_classes` with a normalisation layer before tanh; this layer is local."""

    def init_normalized(key: jax.Array) -> Any:
        return init(key) | {"norm": {"scale": jnp.ones(16), "shift": jnp.zeros(16)}}

    def apply(params: Any, state: Any, x: jax.Array, training: bool) -> tuple[jax.Array, Any]:
        hidden = x @ params["body"]["w"] + params["body"]["b"]
        used = {"mean": hidden.mean(0), "variance": hidden.var(0)} if training else state
        hidden = (hidden - used["mean"]) / jnp.sqrt(used["variance"] + 1e-5)
        hidden = jnp.tanh(params["norm"]["scale"] * hidden + params["norm"]["shift"])
        return hidden @ params["head"]["w"] + params["head"]["b"], used

    return fr.models.from_function(
        apply,
        init_normalized,
        init_state={"mean": jnp.zeros(16), "variance": jnp.ones(16)},
        local="norm/*",
        state="local",
        inputs="x",
        loss="cross_entropy",
        metrics=["accuracy"],
    )


def all_global(model: fr.Model) -> fr.Model:
    """Return a model whose local part is global: the same for everybody."""
    lookups: Any = model.lookups
    return model._replace(
        init_global=lambda key: {"shared": model.init_global(key), "same": model.init_local(key)},
        init_local=lambda key: (),
        predict=lambda params, local, batch: model.predict(params["shared"], params["same"], batch),
        lookups={f"shared/{path}": features for path, features in lookups.items()},
    )


class RelativesData:
    """The data of all tasks; each is loaded or made when it is first needed."""

    def __init__(self, folder: Path, clients: int = 2000, many: int = 100_000):
        """Look for data in `folder`; synthetic data has this many clients."""
        self.folder, self.clients, self.many = folder, clients, many
        self.task = functools.lru_cache(maxsize=2)(self._task)

    def _task(self, name: str) -> Task:
        if name == "ratings":
            return load_ratings(self.folder)
        if name in ("blogs", "tweets"):
            return load_words(self.folder, name)
        return load_classes(*((self.many, 500) if name == "once" else (self.clients, 50)))

    def fingerprint(self) -> str:
        """Name the data: sizes of files and of synthetic data."""
        sizes = [path.stat().st_size for path in sorted(self.folder.glob("*.gz")) + sorted(self.folder.glob("ml*.zip"))]
        return f"{self.clients}-{self.many}-{sum(sizes)}"

    def facts(self) -> list[str]:
        """Describe the data and how it is divided."""
        return [
            f"Synthetic data has {self.clients:,} clients, and {self.many:,} where each takes part at most once; "
            "`make_classes` is its generator.",
            "80 % of the clients train, on the first 80 % of their examples; rates are chosen on 10 %, and 10 % are "
            "tested. Half of the examples of a client who is not in training are support.",
            "The server takes the mean change (for ratings by Adam with rate .03, for next words by FedYogi with rate "
            ".02), with Reptile half of it. Local training has no rounds; it takes four times as many steps as others "
            "take to adapt.",
        ]


# ---- the methods ----


def steps(rate: float, task: Task, epochs: int = 1) -> fr.kit.Solver:
    """Return SGD, clipped so that no rate diverges at once."""
    sgd = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate))
    return fr.gradient_descent(sgd, batch_size=task.batch_size, epochs=epochs)


def finetuned(algorithm: fr.Algorithm, rate: float, task: Task) -> fr.Algorithm:
    """Serve unseen clients with a model that they finetune."""
    return fr.with_finetuning(algorithm, steps(rate, task, task.epochs))


Make = Callable[[Task, float], fr.Algorithm]


def _fedrecon(split: fr.split.Split) -> Make:
    def make(task: Task, rate: float) -> fr.Algorithm:
        adapt, update = steps(rate, task, task.epochs), steps(rate, task)
        return fr.federated_reconstruction(
            task.split, split=split, reconstruct=adapt, update=update, server=task.server
        )

    return make


def _both_parts(name: str, part: str) -> Make:
    """Make a method that trains both parts at once, and reconstructs the local part of unseen clients."""

    def make(task: Task, rate: float) -> fr.Algorithm:
        model, adapt = getattr(task, part), steps(rate, task, task.epochs)
        return getattr(algorithms, name)(model, update=steps(rate, task), server=task.server, reconstruct=adapt)

    return make


def _local(task: Task, rate: float) -> fr.Algorithm:
    assert task.alone is not None
    return fr.algorithms.local_training(task.alone, train=steps(rate, task, 4 * task.epochs))


def _per_fedavg(*, first_order: bool) -> Make:
    def make(task: Task, rate: float) -> fr.Algorithm:
        once = fr.gradient_descent(optax.sgd(rate), batch_size=task.batch_size, steps=1)
        update, server = steps(rate, task), task.server
        return algorithms.per_fedavg(task.whole, adapt=once, update=update, server=server, first_order=first_order)

    return make


def _scaffold(task: Task, rate: float) -> fr.Algorithm:
    clients = len(task.train)
    scaffold = algorithms.scaffold(
        task.whole, learning_rate=rate, batch_size=task.batch_size, num_clients=clients, server=task.server
    )
    return finetuned(scaffold, rate, task)


METHODS: Mapping[str, tuple[str, Make]] = {
    "fedrecon": ("Federated Reconstruction", _fedrecon(fr.split.half())),
    "fedrecon_no_split": ("Federated Reconstruction, no split", _fedrecon(fr.split.none())),
    "fedavg": (
        "FedAvg",
        lambda task, rate: fr.federated_averaging(task.whole, update=steps(rate, task), server=task.server),
    ),
    "finetuning": (
        "FedAvg, finetuned",
        lambda task, rate: finetuned(
            fr.federated_averaging(task.whole, update=steps(rate, task), server=task.server), rate, task
        ),
    ),
    "fedprox": (
        "FedProx, finetuned",
        lambda task, rate: finetuned(
            algorithms.fedprox(task.whole, update=steps(rate, task), strength=0.1, server=task.server), rate, task
        ),
    ),
    "scaffold": ("SCAFFOLD, finetuned", _scaffold),
    "reptile": (
        "Reptile",
        lambda task, rate: algorithms.reptile(
            task.whole, update=steps(rate, task), learning_rate=0.5, finetune=steps(rate, task, task.epochs)
        ),
    ),
    "per_fedavg": ("Per-FedAvg", _per_fedavg(first_order=False)),
    "per_fedavg_fo": ("Per-FedAvg (FO)", _per_fedavg(first_order=True)),
    "pfedme": (
        "pFedMe",
        lambda task, rate: algorithms.pfedme(
            task.whole, update=steps(rate, task), personal=optax.sgd(rate), steps=3, strength=1.0, server=task.server
        ),
    ),
    "ditto": (
        "Ditto",
        lambda task, rate: algorithms.ditto(
            task.whole, update=steps(rate, task), personal=steps(rate, task), strength=0.1, server=task.server
        ),
    ),
    "apfl": ("APFL", lambda task, rate: algorithms.apfl(task.whole, update=steps(rate, task), server=task.server)),
    "fedper": ("FedPer (FedSim, FedMF)", _both_parts("fedper", "split")),
    "lg_fedavg": ("LG-FedAvg", _both_parts("lg_fedavg", "front")),
    "fedbn": ("FedBN, with a normalisation layer", _both_parts("fedbn", "normalized")),
    "fedrep": (
        "FedRep (FedAlt)",
        lambda task, rate: algorithms.fedrep(
            task.split, head=steps(rate, task, task.epochs), body=steps(rate, task), server=task.server
        ),
    ),
    "fedbabu": (
        "FedBABU",
        lambda task, rate: algorithms.fedbabu(
            task.split, head=steps(rate, task, task.epochs), update=steps(rate, task), server=task.server
        ),
    ),
    "local": ("Local training, nothing sent", _local),
}


# ---- running ----


def run_job(job: Job, data: RelativesData, seed: int, part: str = "test", progress: Progress = silent) -> Any:
    """Train a method on a task with every rate, and measure the best on unseen clients and on seen ones."""
    start = time.perf_counter()
    name, method = job.name.split("-", 1)
    task = data.task(name)
    make = METHODS[method][1]
    per_round = task.per_round
    if name == "once":  # in so many rounds nobody is drawn twice
        per_round = min(per_round, len(task.train) // max(job.config.rounds, 1))
    sampling = fr.Sampling(per_round, apart=job.config.rounds if name == "once" else 1)
    rounds = 0 if method == "local" else job.config.rounds
    trials: list[dict[str, float]] = []
    best = None
    rates = list(job.candidates["learning_rate"])
    for number in range(len(rates) + (len(rates) > 1)):
        rate = rates[number] if number < len(rates) else rate_beyond(trials)
        algorithm = make(task, rate)
        options: dict[str, Any] = {"clients_per_round": sampling, "seed": seed}
        options["callbacks"] = [fr.ProgressBar(progress)]
        run = fr.train(algorithm, task.train, rounds=rounds, **options)
        loss = as_float(fr.evaluate(algorithm, run.params, task.valid, seed=seed).micro["loss"])
        trials.append({"learning_rate": rate, "valid": loss})
        if best is None or (np.isfinite(loss) and not loss >= best[0]):
            best = loss, algorithm, run
    assert best is not None
    _, algorithm, run = best
    unseen = fr.evaluate(algorithm, run.params, getattr(task, part), seed=seed)
    if keeps_local(algorithm):
        seen = fr.evaluate(algorithm, run.params, task.later, client_state=run.client_state, protocol="standard")
    else:
        seen = fr.evaluate(algorithm, run.params, task.everything, split=SEEN, seed=seed)
    costs = measure_costs(algorithm, task.train)
    worst = {"micro": unseen.worst(0.1), "clients": max(1, round(unseen.clients / 10)), "diverged": 0}
    measured = {"unseen": unseen.summary(), "seen": seen.summary(), "worst": worst}
    return {
        "evaluations": [{"round": job.config.rounds, **measured}],
        "losses": [round(entry["loss"], 5) for entry in run.history if entry["kind"] == "round"],
        "costs": dataclasses.asdict(costs),
        "trials": trials,
        "clients": len(task.train),
        "per_round": per_round,
        "seconds": round(time.perf_counter() - start, 2),
    }


def rate_beyond(trials: list[dict[str, float]]) -> float:
    """Return the next rate on the side of the better of the last two, where rates ascend."""
    low, high = trials[-2:]
    factor = high["learning_rate"] / low["learning_rate"]
    losses = [trial["valid"] if np.isfinite(trial["valid"]) else np.inf for trial in (low, high)]
    larger_is_better = losses[1] < losses[0]
    rate = high["learning_rate"] * factor if larger_is_better else low["learning_rate"] / factor
    return float(f"{rate:.2g}")


def load(source: str, progress: Progress = silent) -> RelativesData:
    """Use the files of a folder."""
    return RelativesData(Path(source))


# ---- the report ----

ROUNDS = {"ratings": 200, "blogs": 200, "tweets": 200, "classes": 100, "once": 100}
KEEPING_LOCAL = ("ditto", "apfl", "fedper", "fedrep", "lg_fedavg", "fedbn")
KEEPING = ("scaffold", *KEEPING_LOCAL)  # SCAFFOLD keeps control variates


def _job(task: str, method: str) -> Job:
    # Of the config, only the number of rounds counts.
    config = ClicksConfig(data=ClickData(source="made"), rounds=ROUNDS[task], evaluate_every=ROUNDS[task])
    title = f"{METHODS[method][0]} ({task})"
    measures = ("unseen", "seen")
    return Job(f"{task}-{method}", title, config, method, measures, candidates={"learning_rate": RATES[task]})


def methods_of(task: str) -> list[str]:
    """Return the methods that a task has models for."""
    return [method for method in METHODS if task in SYNTHETIC or method not in SYNTHETIC_ONLY]


JOBS = tuple(_job(task, method) for task in TASKS for method in methods_of(task))


def metric_of(results: Results, job: str, measure: str = "unseen") -> Spread:
    """Return the main metric of a job: RMSE in stars, or accuracy in percent."""
    name = METRIC.get(job.split("-")[0], "accuracy")
    scale = 1 if name == "rmse" else 100
    values = [scale * as_float(result["evaluations"][-1][measure]["micro"][name]) for result in results[job]]
    return spread(values)


def _columns(result: Result) -> list[str]:
    costs = result["costs"]
    best = min(result["trials"], key=lambda trial: np.inf if trial["valid"] is None else trial["valid"])
    sizes = [format_size(costs[name]) for name in ("down", "up", "state")]
    return [*sizes, f"{costs['steps']:.0f}", "yes" if costs["once"] else "no", f"{best['learning_rate']:g}"]


HEADER = ("", "unseen", "worst tenth", "seen", "down", "up", "keeps", "steps", "once", "rate")


def _task_table(task: str, results: Results) -> list[Block]:
    jobs = {method: f"{task}-{method}" for method in methods_of(task)}
    done = {method: job for method, job in jobs.items() if job in results}
    if not done:
        return ["Not run."]
    digits = 3 if task in METRIC else 1
    rows = []
    for method, job in done.items():
        measures = [metric_of(results, job, measure).format(digits) for measure in ("unseen", "worst", "seen")]
        rows.append([METHODS[method][0], *measures, *_columns(results[job][0])])
    first = next(iter(done.values()))
    result = results[first][0]
    last = result["evaluations"][-1]
    note = (
        f"{result['clients']:,} clients train, {result['per_round']} in each of {last['round']} rounds; "
        f"{last['unseen']['clients']:,} unseen clients are measured. The worst tenth are those with the highest loss. "
        f"`rate` is the best of three on validation clients: {RATES[task][0]:g}, {RATES[task][1]:g}, and the next "
        "beyond the better of these."
    )
    if task == "once":
        drawn = result["per_round"] * last["round"]
        note += (
            f" {drawn:,} of the {result['clients']:,} training clients are drawn, each once; seen are all of them, and "
            "those who were not drawn keep what they start with."
        )
    return [Table(HEADER, rows), note, *missing_jobs({METHODS[m][0]: job for m, job in jobs.items()}, results)]


def _none_beats(measure: str, results: Results) -> tuple[bool, str]:
    ours = metric_of(results, "once-fedrecon", measure).mean
    theirs = {METHODS[name][0]: metric_of(results, f"once-{name}", measure).mean for name in KEEPING_LOCAL}
    best = max(theirs, key=lambda name: theirs[name])
    text = f"Federated Reconstruction {ours:.1f} %; the best that keeps something, {best}: {theirs[best]:.1f} %."
    return ours >= theirs[best], text


def _bars(results: Results) -> dict[str, Any]:
    rows = {}
    for method, (title, _) in METHODS.items():
        rows[title] = [metric_of(results, f"{task}-{method}").mean for task in SYNTHETIC]
    return {"rows": rows, "keeping": [METHODS[name][0] for name in KEEPING]}


def _draw(numbers: dict[str, Any], figure: Any) -> None:
    axes = figure.subplots()
    for y, (title, (often, once)) in enumerate(reversed(numbers["rows"].items())):
        color = "tab:red" if title in numbers["keeping"] else "tab:blue"
        axes.plot([often, once], [y, y], color=color, linewidth=1)
        axes.plot(often, y, "o", color=color)
        axes.plot(once, y, "o", color=color, markerfacecolor="white")
    axes.set_yticks(range(len(numbers["rows"])), list(reversed(numbers["rows"])))
    axes.set_xlabel("accuracy on unseen clients in %\nfilled: clients come back; hollow: they never do")


KIND = Kind(load, run_job, ("accuracy", "rmse", "loss"), maximize=True, quick_rounds=100)
_SYNTHETIC_JOBS = tuple(f"{task}-{method}" for task in SYNTHETIC for method in METHODS)
STUDY = Study(
    name="relatives",
    title="Federated Reconstruction and its relatives",
    kind=KIND,
    jobs=JOBS,
    sections=tuple(
        Section(title, tuple(f"{task}-{method}" for method in methods_of(task)), functools.partial(_task_table, task))
        for task, title in TASKS.items()
    ),
    figures=(
        Figure(
            "relatives",
            "Clients that take part at most once",
            "Methods whose clients keep something from round to round are red.",
            _SYNTHETIC_JOBS,
            _bars,
            _draw,
        ),
    ),
    claims=tuple(
        Claim(
            f"Where nobody takes part twice, no method with local parts that clients keep serves {whom} better",
            tuple(f"once-{name}" for name in ("fedrecon", *KEEPING_LOCAL)),
            functools.partial(_none_beats, measure),
        )
        for measure, whom in (("seen", "training clients"), ("unseen", "unseen clients"))
    ),
    seeds=1,
)
