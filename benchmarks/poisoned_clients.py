"""How many hostile clients out of a hundred spoil a model, with a plain mean and with clipping to the median norm.

python benchmarks/poisoned_clients.py
"""

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
    chain, stages = fr.aggregate.chain, fr.aggregate
    return {
        "mean": fr.aggregate.mean(),
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


def main(counts=(0, 1, 2, 5, 10, 20, 30, 40)):
    ratings = fr.data.synthetic_ratings(num_users=140, num_items=120, mean_ratings=30, seed=0)
    honest, valid = ratings.take(np.arange(100)), ratings.take(np.arange(100, 140))
    print(f"{'poisoned of 100':>16} {'aggregator':>14} {'RMSE':>9} {'diverged of 40':>15}")
    for name, aggregate in aggregators().items():
        for count in counts:
            algorithm, params = train(aggregate, poisoned(honest, count), ratings.num_items)
            found = fr.evaluate(algorithm, params, valid)
            print(f"{count:>16} {name:>14} {found.micro['rmse']:>9.3f} {found.diverged:>15}", flush=True)


if __name__ == "__main__":
    main()
