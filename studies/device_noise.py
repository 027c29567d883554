"""What the noise of devices costs: the aggregator of a device plan with `--privacy.epsilon`, on MovieLens small.

python -m studies.device_noise

A model of a quarter of the users comes first. Half of the users are devices that train it further, all of them in every
round; the error is that of the last quarter. Devices do what they do in a deployment: they clip, round to integers and
add Skellam noise, and the server sees the sum. Larger populations are made of copies: with 100, everybody is there 100
times, so sums are 100 times as large and have the noise of as many more devices. Real people differ, so more of them
would also teach the model more than copies do.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import io
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedrecon._src.algorithms.algorithm import with_params
from fedrecon._src.algorithms.rounds import client_total, server_update, total_shapes
from fedrecon._src.app.cli import main as fedrecon
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.keys import round_key, run_keys
from fedrecon._src.data import load
from fedrecon._src.device.bundle_writer import MOST_EXAMPLES
from fedrecon._src.device.model_bundle import DeviceTraining
from fedrecon._src.device.update_graph import DevicePlan
from fedrecon._src.recommend.saved_models import SavedModel, open_model
from fedrecon._src.server.fixed_point import add_noise

HELPER = 64 * "0"  # a key that nobody has: nothing is masked here
NO_NOISE = 1e-3  # a noise multiplier; the grid of integers follows from it, and nothing is added


class Cost(NamedTuple):
    """The error after training with noise.

    Attributes:
      devices: how many take part in a round.
      epsilon: of all rounds together; None without noise.
      noise_multiplier: of as many reports as the plan asks for at least.
      rmse: on people who are no devices.
    """

    devices: int
    epsilon: float | None
    noise_multiplier: float | None
    rmse: float


def call(*words: object) -> str:
    """Run a command of fedrecon in this process, and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = fedrecon([str(word) for word in words])
    if code:
        raise ValueError(f"fedrecon {words[0]} failed: {printed.getvalue()}")
    return printed.getvalue()


def write_parts(ratings: Any, folder: Path, seed: int) -> list[dict[str, Any]]:
    """Write a quarter of the users to start.csv and one to unseen.csv; return the ratings of the others, by item id."""
    people = [{"item": ratings.item_ids[person["item"]], "rating": person["rating"]} for person in ratings]
    order, quarter = np.random.default_rng(seed).permutation(len(people)), len(people) // 4
    for name, users in (("start.csv", order[:quarter]), ("unseen.csv", order[-quarter:])):
        with (folder / name).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("user", "item", "rating"))
            for user in users:
                columns = (people[user]["item"].tolist(), people[user]["rating"].tolist())
                writer.writerows((user, *pair) for pair in zip(*columns, strict=True))
    return [people[user] for user in order[quarter:-quarter]]


def as_devices(people: Sequence[dict[str, Any]], saved: SavedModel[Any]) -> Clients:
    """Return people as the clients that a bundle makes of them: known items alone, and the newest of too many."""
    places = {item: place for place, item in enumerate(saved.legend.ids.tolist())}
    items, stars, owners = [], [], []
    for number, person in enumerate(people):
        pairs = zip(person["item"].tolist(), person["rating"].tolist(), strict=True)
        known = [(places[item], rating) for item, rating in pairs if item in places][-MOST_EXAMPLES:]
        if len(known) >= DevicePlan().min_examples:
            items += [item for item, _ in known]
            stars += [rating for _, rating in known]
            owners += [f"device-{number}"] * len(known)
    columns = {"item": np.array(items, np.int32), "rating": np.array(stars, np.float32)}
    return Clients.from_columns(columns, client=np.array(owners))


def train(
    saved: SavedModel[Any],
    devices: Clients,
    copies: int,
    epsilon: float | None,
    rounds: int,
    clip_norm: float,
    seed: int,
) -> tuple[Any, float | None]:
    """Return the parameters after rounds over copies of all devices, and the noise multiplier."""
    count = copies * len(devices)
    plan = DevicePlan(rounds=rounds, least=count // 2, helper=HELPER, delta=0.1 / count)
    how = DeviceTraining(plan, clip_norm, most=count, epsilon=epsilon, per_round=count)
    how = how._replace(noise_multiplier=NO_NOISE) if epsilon is None else how
    algorithm = how.algorithm(saved, MOST_EXAMPLES)
    share_of = algorithm.aggregator.share
    assert share_of is not None
    share, entropy = share_of(total_shapes(algorithm).parts), np.random.default_rng(seed)
    state = with_params(algorithm.init(run_keys(seed).init), saved.params)
    for number in range(rounds):
        key = round_key(seed, number)
        total = client_total(algorithm, algorithm.message(state), devices, key).total
        total = jax.tree.map(lambda integers: integers * np.uint32(copies), total)
        total = total if epsilon is None else add_noise(share, total, entropy, count)
        state = server_update(algorithm, state, [total], key)
    return algorithm.params(state), None if epsilon is None else share.noise_multiplier


def measure(
    ratings: Any,
    epsilons: Sequence[float],
    copies: Sequence[int],
    rounds: int,
    clip_norm: float,
    seed: int = 0,
    options: Sequence[str] = (),
) -> Iterator[Cost]:
    """Yield the error before the rounds (of 0 devices), after rounds without noise, and with noise.

    Args:
      ratings: of everybody.
      epsilons: of all rounds together.
      copies: of every device.
      rounds: how many.
      clip_norm: the largest norm of what a device adds.
      seed: of everything random.
      options: of `fedrecon train` for the model to begin with.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        people = write_parts(ratings, folder, seed)
        call("train", folder / "start.csv", "--out", folder / "start", *options)
        saved = open_model(folder / "start")
        devices = as_devices(people, saved)

        def error(params: Any) -> float:
            dataclasses.replace(saved, params=params).save(folder / "model")
            printed = call("evaluate", folder / "model", "--ratings", folder / "unseen.csv", "--json")
            return json.loads(printed)["micro"]["rmse"]

        yield Cost(0, None, None, error(saved.params))
        for number, epsilon in [(1, None), *((number, epsilon) for number in copies for epsilon in epsilons)]:
            params, multiplier = train(saved, devices, number, epsilon, rounds, clip_norm, seed)
            yield Cost(number * len(devices), epsilon, multiplier, error(params))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the error with the noise of devices, for several epsilons and sizes of the population."""
    parser = argparse.ArgumentParser("python -m studies.device_noise", description=main.__doc__)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[8.0, 4.0, 2.0], help="of all rounds together")
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 10, 100], help="how often everybody is there")
    parser.add_argument("--rounds", type=int, default=10, help="of training on devices, everybody in all of them")
    parser.add_argument("--clip-norm", type=float, default=0.5, help="the largest norm of what a device adds")
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    options = vars(parser.parse_args(argv))
    for cost in measure(load("movielens-small"), **options):
        epsilon = "no noise" if cost.epsilon is None else f"epsilon {cost.epsilon:g}, noise {cost.noise_multiplier:.2f}"
        print(f"{cost.devices:>9,} devices, {epsilon}: RMSE {cost.rmse:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
