"""MovieLens 1M as the paper studied it, and a few rows beyond.

fedrecon reproduce movielens --data ml-1m.zip --out study
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedrecon.config import Factorization, Reconstruct, Server, Update
from fedrecon.studies import claims, figures
from fedrecon.studies.study import Claim, Figure, Grid, Job, Row, Setting, Study

# Learning rates are chosen on validation users (or, for seen users, on validation ratings) with --tune; comments say
# what they had there.
LONG = 2000  # rounds by which the published settings have stopped improving
CURVE = 50  # rounds between the points of an accuracy curve

BASE = Setting(every=CURVE, on_to=LONG)
FEDAVG = Update(learning_rate=0.1)
FEDRECON_GRID = Grid(server=(0.1, 0.5, 1.0), reconstruct=(0.1, 0.5), update=(0.1, 0.5))
FEDAVG_GRID = Grid(server=(0.1, 0.5, 1.0), update=(0.1, 0.5))
CENTRALIZED_GRID = Grid(update=(0.1, 0.3, 0.5, 1.0, 2.0))


def centralized(learning_rate: float, **changes: Any) -> Setting:
    """Train on all examples in one place, in batches of 300, for 20 epochs."""
    update = Update(learning_rate=learning_rate, batch_size=300, steps=None)
    return Setting(train="centralized", update=update, rounds=20, every=20, **changes)


def with_server(optimizer: Any, learning_rate: float) -> Setting:
    """Train as published, but with another server optimizer."""
    return replace(BASE, server=Server(optimizer=optimizer, learning_rate=learning_rate), on_to=None, every=500)


def with_steps(reconstruct: int = 50, update: int = 50) -> Setting:
    """Train as published, but with other numbers of steps."""
    return replace(BASE, reconstruct=Reconstruct(steps=reconstruct), update=Update(steps=update), on_to=None, every=500)


BIASES = Factorization(biases=True, init_mean=3.5)
LEAST_SQUARES = Reconstruct(solver="least-squares", ridge=1.0)
ADAGRAD = Server(optimizer="adagrad", learning_rate=0.1)
BEST = Setting(model=BIASES, reconstruct=LEAST_SQUARES, server=ADAGRAD, every=CURVE)

PAPER_JOBS = (
    Job("centralized", "Centralized", centralized(0.5, users="seen", measures=("kept",)), CENTRALIZED_GRID),
    Job(
        "centralized-unseen",
        "Centralized, unseen users",
        centralized(0.5, measures=("random", "recon")),
        CENTRALIZED_GRID,
    ),
    Job(
        "centralized-fast",
        "Centralized with learning rate 1.0, unseen users",
        centralized(1.0),
    ),
    Job(
        "fedavg-seen",
        "FedAvg, seen users",
        Setting(train="fedavg", users="seen", measures=("kept",), update=FEDAVG),
        FEDAVG_GRID,
    ),
    Job("fedavg", "FedAvg, unseen users", Setting(train="fedavg", update=FEDAVG, every=CURVE), FEDAVG_GRID),
    Job(
        "fedavg-dense-seen",
        "FedAvg of everything, seen users",
        Setting(train="fedavg-dense", users="seen", measures=("kept",), update=FEDAVG),
    ),
    Job(
        "fedavg-dense", "FedAvg of everything, unseen users", Setting(train="fedavg-dense", update=FEDAVG, every=CURVE)
    ),
    Job("fedrecon", "FedRecon", BASE, FEDRECON_GRID),
    Job("no-split", "FedRecon, no split", replace(BASE, split="none", every=500), FEDRECON_GRID),
    Job(
        "joint",
        "FedRecon, joint training",
        replace(BASE, update=Update(joint=True, learning_rate=0.1), every=500),
        FEDRECON_GRID,
    ),
    Job(
        "adagrad",
        "FedRecon, Adagrad server",
        replace(BASE, server=Server(optimizer="adagrad", learning_rate=0.5)),
        FEDRECON_GRID,
    ),
)
BEYOND_JOBS = (
    Job("biases", "FedRecon with biases", replace(BASE, model=BIASES, on_to=None, every=500)),
    Job("least-squares", "least squares, biases", Setting(model=BIASES, reconstruct=LEAST_SQUARES)),
    Job(
        "second-order",
        "second order",
        Setting(model=BIASES, reconstruct=LEAST_SQUARES, update=Update(second_order=True, steps=5, batch_size=50)),
    ),
    Job(
        "fixed-default",
        "least squares, biases, Adagrad: users with few ratings",
        Setting(model=BIASES, reconstruct=LEAST_SQUARES, server=ADAGRAD, few=(0, 1, 2, 5)),
    ),
    Job(
        "learned-default",
        "the same with a learned default",
        Setting(
            model=replace(BIASES, learned_default=True),
            reconstruct=LEAST_SQUARES,
            server=ADAGRAD,
            few=(0, 1, 2, 5),
        ),
    ),
    Job("best", "best combination", BEST),
)
RECONSTRUCT_STEPS = {
    0: "reconstruct-0",
    1: "reconstruct-1",
    2: "reconstruct-2",
    5: "reconstruct-5",
    10: "reconstruct-10",
}
UPDATE_STEPS = {1: "update-1", 2: "update-2", 5: "update-5", 10: "update-10"}
SERVERS = {
    "SGD 1.0": "fedrecon",
    "momentum 0.1": "momentum",
    "Adagrad 0.5": "adagrad",
    "Adam 0.03": "adam",
    "Yogi 0.03": "yogi",
}
FIGURE_JOBS = (
    *(
        Job(name, f"{n} reconstruction steps", with_steps(reconstruct=n), Grid(reconstruct=(0.1, 0.5)) if n else None)
        for n, name in RECONSTRUCT_STEPS.items()
    ),
    *(Job(name, f"{n} update steps", with_steps(update=n)) for n, name in UPDATE_STEPS.items()),
    Job("momentum", "server momentum", with_server("momentum", 0.1), Grid(server=(0.03, 0.1, 0.3))),
    Job("adam", "server Adam", with_server("adam", 0.03), Grid(server=(0.01, 0.03, 0.1))),
    Job("yogi", "server Yogi", with_server("yogi", 0.03), Grid(server=(0.01, 0.03, 0.1))),
)

ROWS = (
    Row("Centralized + StandardEval", "centralized", "kept", (0.923, 43.2)),
    Row("Centralized + StandardEval (unseen users, random embeddings)", "centralized-unseen", "random", (3.80, 0.0)),
    Row("Centralized + ReconEval", "centralized-unseen", "recon", (1.36, 40.8)),
    Row("Centralized with learning rate 1.0 + ReconEval", "centralized-fast", "recon"),
    Row("FedAvg + StandardEval (user rows kept by owners)", "fedavg-seen", "kept", (0.939, 41.5)),
    Row("FedAvg + ReconEval (user rows kept by owners)", "fedavg", "recon", (0.934, 40.0)),
    Row("FedAvg + StandardEval (dense reading: user rows averaged)", "fedavg-dense-seen", "kept"),
    Row("FedAvg + ReconEval (dense reading: user rows averaged)", "fedavg-dense", "recon"),
    Row("FedRecon", "fedrecon", "recon", (0.907, 43.3)),
    Row("FedRecon, no split", "no-split", "recon", (0.912, 42.5)),
    Row("FedRecon, joint training", "joint", "recon", (0.915, 42.1)),
    Row("FedRecon, Adagrad server", "adagrad", "recon", (0.883, 44.1)),
)
BEYOND = (
    Row("FedRecon with biases", "biases", "recon"),
    Row("… and least-squares reconstruction", "least-squares", "recon"),
    Row("… and second-order training", "second-order", "recon"),
    Row("least squares, biases, Adagrad server", "fixed-default", "recon"),
    Row("… and a learned default", "learned-default", "recon"),
    Row("Best combination", "best", "recon"),
)

FIGURES = (
    Figure(
        "reconstruction-steps",
        "Accuracy against reconstruction steps",
        "Each point trained and evaluated with its number of steps; accuracy relative to 50 steps.",
        (*RECONSTRUCT_STEPS.values(), "fedrecon"),
        figures.relative_accuracy({**RECONSTRUCT_STEPS, 50: "fedrecon"}, "fedrecon"),
        figures.draw_relative_accuracy("reconstruction"),
    ),
    Figure(
        "update-steps",
        "Accuracy against update steps",
        "Each point trained with its number of update steps; accuracy relative to 50 steps.",
        (*UPDATE_STEPS.values(), "fedrecon"),
        figures.relative_accuracy({**UPDATE_STEPS, 50: "fedrecon"}, "fedrecon"),
        figures.draw_relative_accuracy("update"),
    ),
    Figure(
        "server-optimizers",
        "Loss over rounds for server optimizers",
        "Query loss of the clients of each round, a running mean over 10 rounds, averaged over seeds.",
        tuple(SERVERS.values()),
        figures.losses(SERVERS),
        figures.draw_losses,
    ),
    Figure(
        "communication",
        "Accuracy against parameters communicated",
        "To and from all clients of all rounds so far, counted from the arrays; ReconEval on unseen users.",
        ("fedrecon", "adagrad", "fedavg", "fedavg-dense", "best"),
        figures.communication(
            {
                "FedRecon": "fedrecon",
                "FedRecon, Adagrad": "adagrad",
                "FedAvg, user rows kept": "fedavg",
                "FedAvg, user rows averaged": "fedavg-dense",
                "best combination": "best",
            }
        ),
        figures.draw_communication,
    ),
    Figure(
        "rmse-distribution",
        "RMSE of single unseen users",
        "All seeds together. A user diverged if its loss is not finite or a thousand times the median user's.",
        ("fedrecon", "centralized-unseen", "centralized-fast"),
        figures.distribution(
            {
                "FedRecon": ("fedrecon", "recon"),
                "Centralized": ("centralized-unseen", "recon"),
                "Centralized, learning rate 1.0": ("centralized-fast", "recon"),
            }
        ),
        figures.draw_distribution,
    ),
)

CLAIMS = (
    Claim(
        "FedRecon on unseen users matches or beats Centralized on seen users",
        ("fedrecon", "centralized"),
        lambda found: claims.matches(
            claims.of(found, "fedrecon"),
            claims.of(found, "centralized", "kept"),
            ("FedRecon on unseen users", "Centralized on seen users"),
        ),
    ),
    Claim(
        "Centralized + ReconEval is much worse than FedRecon",
        ("centralized-unseen", "centralized-fast", "fedrecon"),
        lambda found: claims.much_worse(
            claims.of(found, "centralized-unseen"),
            claims.of(found, "fedrecon"),
            ("Centralized + ReconEval", "FedRecon"),
            aside=claims.numbers("With learning rate 1.0", claims.of(found, "centralized-fast")),
        ),
    ),
    Claim(
        "One reconstruction step recovers most of the accuracy",
        ("reconstruct-1", "fedrecon"),
        lambda found: claims.recovers_most(claims.of(found, "reconstruct-1"), claims.of(found, "fedrecon"), "one step"),
    ),
    Claim(
        "Zero reconstruction steps give nothing",
        ("reconstruct-0", "fedrecon"),
        lambda found: claims.gives_nothing(claims.of(found, "reconstruct-0"), claims.of(found, "fedrecon"), "no steps"),
    ),
    Claim(
        "No split and joint training cost little",
        ("no-split", "joint", "fedrecon"),
        lambda found: claims.cost_little(
            {"no split": claims.of(found, "no-split"), "joint": claims.of(found, "joint")},
            claims.of(found, "fedrecon"),
        ),
    ),
    Claim(
        "An Adagrad server helps",
        ("adagrad", "fedrecon"),
        lambda found: claims.helps(
            claims.of(found, "adagrad"), claims.of(found, "fedrecon"), ("Adagrad server", "SGD server")
        ),
    ),
)

STUDY = Study(
    name="movielens",
    title="Federated Reconstruction on MovieLens 1M",
    jobs=(*PAPER_JOBS, *BEYOND_JOBS, *FIGURE_JOBS),
    rows=ROWS,
    beyond=BEYOND,
    figures=FIGURES,
    claims=CLAIMS,
)
