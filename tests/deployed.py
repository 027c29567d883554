"""A small deployment in one process: files of a few nodes, nodes as objects, a clock that does not wait."""

import contextlib
import csv
import os
import random
import signal
import socket
import subprocess
import sys

import numpy as np

import fedrecon as fr
from fedrecon._src.deploy.node import Memory
from fedrecon._src.deploy.settings_plan import make_plan
from fedrecon._src.recommend.config import (
    Aggregate,
    Data,
    Factorization,
    RatingsConfig,
    Reconstruct,
    Server,
    SplitSettings,
    Update,
)
from fedrecon._src.recommend.tasks import Items
from fedrecon._src.storage.run_folder import RunFolder
from fedrecon.deploy import InProcess, Node, Pace, Plan, serve

ITEMS, NODES = 12, 3


class Waiting:
    """A clock whose time passes only while somebody waits."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def ratings_rows(users=24, seed=0):
    ratings = fr.data.synthetic_ratings(num_users=users, num_items=ITEMS, mean_ratings=6, seed=seed)
    for i, one in enumerate(ratings):
        for item, rating in zip(one["item"], one["rating"], strict=True):
            yield f"u{i:03d}", int(item) + 100, float(rating)


def write_ratings(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("user", "item", "rating"))
        writer.writerows(rows)
    return path


def files_of(folder, nodes=NODES, users=24):
    """Write one file for each node and one with all of them; a user is in one of them."""
    rows = list(ratings_rows(users))
    union = write_ratings(folder / "union.csv", rows)
    parts = [
        write_ratings(folder / f"node{k}.csv", [row for row in rows if int(row[0][1:]) % nodes == k])
        for k in range(nodes)
    ]
    return union, parts


def config_of(**changes):
    settings = {
        "data": Data(source="", fractions=(0.6, 0.2, 0.2), max_examples=10),
        "model": Factorization(dim=3),
        "split": SplitSettings(),
        "reconstruct": Reconstruct(learning_rate=0.1, epochs=2, batch_size=4),
        "update": Update(learning_rate=0.1, batch_size=4),
        "server": Server(learning_rate=1.0),
        "aggregate": Aggregate(),
        "rounds": 3,
        "evaluate_every": 2,
        "seed": 5,
        **changes,
    }
    return RatingsConfig(**settings)


def plan_of(config=None, **options):
    plan = make_plan(config or config_of(), Items(np.arange(100, 100 + ITEMS)), **options)
    return Plan.from_bytes(plan.content)  # the very object that nodes of this process have


def node_of(file, folder=None, accept=lambda plan: True):
    return Node(lambda plan: plan.read_file(file), accept, Memory(folder))


def grid_of(parts):
    return InProcess({k: node_of(part).handle for k, part in enumerate(parts)})


def deployed(plan, grid, folder, *, clock=None, resume=False, **pace):
    pace = {"min_nodes": len(grid.handlers), "deadline": 5.0, "patience": 20.0, **pace}
    return serve(plan, grid, RunFolder(folder), Pace(**pace), clock=clock or Waiting(), resume=resume)


def simulated(plan, union):
    users = plan.read_file(union).users
    run = fr.train(
        plan.algorithm,
        users.train,
        rounds=plan.config.rounds,
        clients_per_round=len(users.train),
        seed=plan.config.seed,
    )
    return run, users


def free_port():
    """Return a port that nobody uses now, below those that the system gives to outgoing connections meanwhile."""
    for port in random.SystemRandom().sample(range(15_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


class Processes:
    """Processes of one test, none of which outlives it."""

    def __init__(self, folder):
        self.folder, self.all = folder, []

    def start(self, name, *words):
        return self.launch(name, [sys.executable, "-m", "fedrecon", *map(str, words)])

    def launch(self, name, command, **environment):
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, **environment}
            )
        self.all.append(process)
        return process

    def kill(self, process, how=signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        process.wait(120)

    def end(self):
        for process in self.all:
            if process.poll() is None:
                self.kill(process)
