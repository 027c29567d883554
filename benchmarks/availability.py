"""Who is heard: rounds with the deployment's sampling, over clients that sleep, drop out and are slow.

    python benchmarks/availability.py --data ml-1m.zip --json figures.json --figure docs/images/availability.png

The server invites `oversample` times as many clients as it wants, of those that are there, and closes the round at the
first so many replies or at the deadline. Clients are there at night by their own clock. How long a client takes grows
with its examples and with how slow its device is. Two parts:

- up to 10 million clients, where nothing is trained: who takes part, and how long rounds take;
- MovieLens, trained with `fr.train`: RMSE of unseen people, the slow and the fast ones apart.
"""

import argparse
import dataclasses
import functools
import json
from pathlib import Path

import numpy as np

import fedrecon as fr

WANTED = 1000  # replies that close a round, of up to 10 million clients
ROUNDS = 24  # one an hour: a day
THERE = 0.1  # the share of clients that are there, on average over a day
SWING = 0.9  # how much more at night than by day
DROPS = 0.08  # invited clients that never answer
START, EACH, SPREAD = 5.0, 0.05, 0.8  # seconds to begin, seconds an example, and the spread of devices (log-normal)
POLICIES = {  # oversample, deadline in seconds
    "no oversampling, no deadline": (1.0, np.inf),
    "oversample 1.3, no deadline": (1.3, np.inf),
    "oversample 1.1, no deadline": (1.1, np.inf),
    "oversample 2, no deadline": (2.0, np.inf),
    "no oversampling, deadline 15 s": (1.0, 15.0),
    "oversample 1.3, deadline 15 s": (1.3, 15.0),
    "oversample 1.1, deadline 60 s": (1.1, 60.0),
}


# ---- devices ----


def seconds_of(slowness, sizes):
    """Return how long clients take for a round."""
    return START + EACH * sizes * slowness


def slowness_of(number, generator):
    """Draw how slow devices are: half of them slower than 1."""
    return generator.lognormal(0.0, SPREAD, number)


def first_replies(generator, seconds, deadline):
    """Return who answers before the deadline, as places, the fastest first."""
    answers = np.flatnonzero((generator.random(len(seconds)) >= DROPS) & (seconds <= deadline))
    return answers[np.argsort(seconds[answers], kind="stable")]


# ---- up to 10 million clients ----


def a_day(number, oversample, deadline, seed=0):
    """Run the rounds of a day over many clients; return who was heard, and how long rounds took."""
    generator = np.random.default_rng(seed)
    sizes = np.minimum(generator.lognormal(4.2, 1.0, number), 2000).astype(np.float32)  # as MovieLens: median 70
    slow = slowness_of(number, generator).astype(np.float32)
    seconds = seconds_of(slow, sizes)
    phase = generator.random(number, dtype=np.float32)  # when it is night for a client
    quarter = np.searchsorted(np.quantile(seconds, (0.25, 0.5, 0.75)), seconds)
    heard, there, taken, closed = np.zeros(4), np.zeros(4), [], []
    for k in range(ROUNDS):
        chance = THERE * (1 + SWING * np.cos(2 * np.pi * (k / ROUNDS - phase)))
        awake = np.flatnonzero(generator.random(number, dtype=np.float32) < chance)
        invited = min(len(awake), int(np.ceil(oversample * WANTED)))
        drawn = generator.choice(awake, invited, replace=False)
        replies = drawn[first_replies(generator, seconds[drawn], deadline)][:WANTED]
        there += np.bincount(quarter[awake], minlength=4)
        heard += np.bincount(quarter[replies], minlength=4)
        taken.append(len(replies))
        full = len(replies) == WANTED or not np.isfinite(deadline)
        closed.append(seconds[replies].max() if full else deadline)
    share = (heard / heard.sum()) / (there / there.sum())
    return {
        "heard": share.tolist(),  # by quarters from the fastest to the slowest: 1 is fair
        "replies": float(np.mean(taken)),
        "seconds": float(np.mean(closed)),
        "of_examples": float(_examples_heard(seconds, sizes, oversample, deadline, generator)),
    }


def _examples_heard(seconds, sizes, oversample, deadline, generator):
    """Return the mean number of examples of those who are heard, as a share of everybody's."""
    drawn = generator.choice(len(seconds), min(len(seconds), int(np.ceil(oversample * 100 * WANTED))), replace=False)
    most = int(len(drawn) / oversample)
    replies = drawn[first_replies(generator, seconds[drawn], deadline)][:most]
    return sizes[replies].mean() / sizes.mean()


# ---- MovieLens ----


@dataclasses.dataclass(frozen=True)
class Timed(fr.Sampling):
    """Sampling in which who answers first is decided by how slow a client is."""

    seconds: tuple = ()
    deadline: float = np.inf

    def replies(self, generator, drawn, sizes):
        """Return who answers before the deadline, the fastest first."""
        del sizes
        return first_replies(generator, np.asarray(self.seconds)[drawn], self.deadline)


@functools.lru_cache(maxsize=1)
def movielens(data):
    """Return training and test users with how long each takes; slow ones have many ratings and slow devices."""
    ratings = fr.data.load(data).shuffle(0).cap(300)
    train, test = ratings.split_clients(0.8, 0.2, seed=0)
    generator = np.random.default_rng(1)
    return train, test, *(seconds_of(slowness_of(len(part), generator), part.sizes) for part in (train, test))


def algorithm_of(num_items):
    return fr.federated_reconstruction(
        fr.models.matrix_factorization(num_items, 16, biases=True, init_mean=3.5),
        split=fr.split.redrawn(fr.split.half()),
        reconstruct=fr.least_squares(2.0),
        update=fr.gradient_descent(fr.optimizers.sgd(0.5), batch_size=5),
        server=fr.optimizers.sgd(1.0),
    )


def trained(data, oversample, deadline, rounds, seeds):
    """Train with a policy; return the RMSE of the slow, the other and all unseen users."""
    train, test, seconds, test_seconds = movielens(data)
    algorithm = _algorithm(train.num_items)
    slow = test_seconds >= np.quantile(test_seconds, 0.75)
    fast = test_seconds <= np.quantile(test_seconds, 0.25)
    evaluators = {name: fr.Evaluator(algorithm, test.take(who)) for name, who in (("slow", slow), ("fast", fast))}
    found = []
    for seed in range(seeds):
        sampling = Timed(100, oversample, seconds=tuple(seconds.tolist()), deadline=deadline)
        run = fr.train(algorithm, train, rounds=rounds, clients_per_round=sampling, seed=seed)
        found.append([evaluators[name](run.params).micro["rmse"] for name in ("slow", "fast")])
    return {name: [float(row[k]) for row in found] for k, name in enumerate(("slow", "fast"))}


@functools.lru_cache(maxsize=1)
def _algorithm(num_items):
    return algorithm_of(num_items)


# ---- figures ----


def draw(path, many, learned):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    names, width = list(POLICIES), 0.2
    for k, title in enumerate(("fastest quarter", "second", "third", "slowest quarter")):
        left.barh(
            [i + (1.5 - k) * width for i in range(len(names))], [many[n]["heard"][k] for n in names], width, label=title
        )
    left.axvline(1, color="black", linewidth=0.8)
    left.set(title="How often they are heard (1 is fair)", yticks=range(len(names)), yticklabels=names)
    left.invert_yaxis()
    left.legend(fontsize=8)
    if learned:
        for k, name in enumerate(("slow", "fast")):
            rows = np.array([learned[n][name] for n in names])
            error = rows.std(1) if rows.shape[1] > 1 else None
            right.errorbar(
                rows.mean(1), np.arange(len(names)) + 0.2 * k - 0.1, xerr=error, fmt="o", label=f"{name}est quarter"
            )
        right.set(title="RMSE of unseen people, MovieLens 1M", yticks=[], ylim=left.get_ylim())
        right.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="synthetic", help="MovieLens 1M; nothing is trained without it")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--clients", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    many, learned, rows = {}, {}, []
    for name, (oversample, deadline) in POLICIES.items():
        found = many[name] = a_day(arguments.clients, oversample, deadline)
        text = f"{found['heard'][3]:.2f}, {found['replies']:.0f} replies, {found['seconds']:.0f} s"
        rows.append((f"{name}: slowest quarter heard", text, ""))
        if arguments.data != "synthetic":
            learned[name] = trained(arguments.data, oversample, deadline, arguments.rounds, arguments.seeds)
            text = ", ".join(f"{who} {np.mean(values):.4f}" for who, values in learned[name].items())
            rows.append((f"{name}: RMSE", text, ""))
        print(*rows[-2:], sep="\n", flush=True)
    if arguments.figure:
        draw(arguments.figure, many, learned)
    arguments.json.write_text(json.dumps({"rows": rows, "figures": {"many": many, "movielens": learned}}))


if __name__ == "__main__":
    main()
