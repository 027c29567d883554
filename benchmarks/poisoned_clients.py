"""How many hostile clients out of a hundred spoil a model, with a plain mean and with clipping to the median norm.

python benchmarks/poisoned_clients.py
python benchmarks/poisoned_clients.py --defaults  # of fedrecon train, with its round zero
"""

import dataclasses
import sys
import tempfile
from pathlib import Path

import numpy as np
import optax

import fedrecon as fr

ROUNDS, PER_ROUND, RATING, RATED = 60, 50, 1000.0, 10


def poisoned(clients, count, rating=RATING, rated=RATED):
    """Return the clients with the first `count` replaced by ones that rate `rated` items with `rating`."""
    columns = {name: column.copy() for name, column in clients.columns.items()}
    ends = clients.ends.copy()
    for i in range(count):
        begin = clients.starts[i]
        ends[i] = min(clients.ends[i], begin + rated)
        columns["rating"][begin : ends[i]] = rating
    return fr.Clients(columns, clients.starts, ends, clients.names)


def aggregators():
    chain, stages = fr.aggregators.chain, fr.aggregators
    return {
        "mean": fr.aggregators.mean(),
        "adaptive_clip": chain(stages.finite(), stages.adaptive_clip(), stages.by_weight()),
    }


def train(aggregate, clients, items, rounds=ROUNDS, per_round=PER_ROUND):
    algorithm = fr.federated_reconstruction(
        fr.models.matrix_factorization(items, dim=8),
        reconstruct=fr.gradient_descent(optax.sgd(0.1), batch_size=5, epochs=5, steps=50),
        update=fr.gradient_descent(optax.sgd(0.2), batch_size=5, steps=50),
        server=optax.sgd(1.0),
        aggregate=aggregate,
    )
    run = fr.train(algorithm, clients, rounds=rounds, clients_per_round=per_round)
    return algorithm, run.params


def with_defaults(count, transform="auto", rating=RATING, rated=RATED, rounds=ROUNDS):
    """Run `fedrecon train` without options on a file of 145 users, of whom `count` of those that train are hostile."""
    from fedrecon._src.app.experiment import run_experiment
    from fedrecon._src.core.display import silent
    from fedrecon._src.recommend.config import DEFAULT
    from fedrecon._src.recommend.tasks import task_of
    from fedrecon._src.storage.run_folder import RunFolder

    ratings = fr.data.synthetic_ratings(num_users=145, num_items=120, mean_ratings=30, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "ratings.csv")
        data = dataclasses.replace(DEFAULT.data, source=str(file), fractions=(0.7, 0.0, 0.3), transform=transform)
        config = dataclasses.replace(DEFAULT, data=data, rounds=rounds, evaluate_every=0)
        write(ratings, file)
        task = task_of(config)
        training = task.divide(config, task.load(config, silent), silent).train.names
        hostile = {str(name) for name in training[:count]}
        write(ratings, file, hostile, rating, rated)
        found = run_experiment(config, RunFolder(Path(folder, "run")))
        updates = [record for record in found.run.history if record["kind"] == "round"]
        clipped = sum(record.get("clipped", 0) for record in updates)
        clipped /= max(1, sum(record["clients"] for record in updates))
        return len(training), found, clipped


def write(ratings, file, hostile=(), rating=RATING, rated=RATED):
    """Write ratings to a CSV file; hostile users rate `rated` items with `rating`."""
    lines = ["user,item,rating"]
    for user in range(len(ratings)):
        mine, bad = ratings[user], str(user) in hostile
        pairs = list(zip(mine["item"], mine["rating"], strict=True))[: rated if bad else None]
        lines += [f"{user},{item},{rating if bad else own}" for item, own in pairs]
    file.write_text("\n".join(lines) + "\n")


def main_with_defaults(counts=(0, 1, 5, 10, 20, 25, 30)):
    print(f"{'poisoned':>12} {'RMSE':>9} {'diverged':>10} {'clipped':>8}   of ratings as they are; auto would take")
    for count in counts:
        auto = with_defaults(count, rounds=1)[1].model.config.model.scale.transform
        training, found, clipped = with_defaults(count, "none")
        of, test = f"{count} of {training}", found.test
        rmse, diverged = test.micro["rmse"], f"{test.diverged} of {test.clients}"
        print(f"{of:>12} {rmse:>9.3f} {diverged:>10} {clipped:>8.1%}   {auto}", flush=True)


def main(counts=(0, 1, 10, 30, 40, 45)):
    ratings = fr.data.synthetic_ratings(num_users=140, num_items=120, mean_ratings=30, seed=0)
    honest, valid = ratings.take(np.arange(100)), ratings.take(np.arange(100, 140))
    print(f"{'poisoned of 100':>16} {'aggregator':>14} {'RMSE':>9} {'diverged of 40':>15}")
    for name, aggregate in aggregators().items():
        for count in counts:
            algorithm, params = train(aggregate, poisoned(honest, count), ratings.num_items)
            found = fr.evaluate(algorithm, params, valid)
            print(f"{count:>16} {name:>14} {found.micro['rmse']:>9.3f} {found.diverged:>15}", flush=True)


if __name__ == "__main__":
    main_with_defaults() if "--defaults" in sys.argv[1:] else main()
