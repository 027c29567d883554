"""W1, the workload of the design: MovieLens 1M, 100 clients a round, batches of 5, K=50, SGD .1 / .5 / 1."""

import argparse
import json
import statistics
import time
from pathlib import Path

import jax

BATCH, STEPS, DIM, CLIENTS = 5, 50, 50, 100
ROUNDS_AT_ONCE = 10


def setup(source):
    """Return the ratings, each user's shuffled once."""
    import fedrecon as fr

    return fr.data.load(source).shuffle(0)


def algorithm(num_items, client=None, model=None):
    """Return Federated Reconstruction with the settings of W1; `client` is U's optimizer."""
    import optax

    import fedrecon as fr

    return fr.federated_reconstruction(
        model or fr.models.matrix_factorization(num_items, DIM),
        split=fr.split.alternate(BATCH),
        reconstruct=fr.gradient_descent(optax.sgd(0.1), batch_size=BATCH, steps=STEPS),
        update=fr.gradient_descent(client or optax.sgd(0.5), batch_size=BATCH, steps=STEPS),
        server=optax.sgd(1.0),
    )


class Rounds:
    """Compiled rounds of one algorithm on one layout, and cohorts for them."""

    def __init__(self, ratings, algorithm, *, clients=CLIENTS, devices=None, block=None, calls=2):
        import fedrecon as fr
        from fedrecon._src.simulation import engine
        from fedrecon._src.simulation.sampling import Cohorts, Sampling

        self.place = fr.layout(block, devices, model=algorithm.model)
        self.cohorts = Cohorts(algorithm, ratings, Sampling(clients), self.place, fr.kit.run_keys(0), ROUNDS_AT_ONCE)
        self.prepared = [self.cohorts.prepare(k * ROUNDS_AT_ONCE, ROUNDS_AT_ONCE) for k in range(calls)]
        self.run_rounds = engine.compile_rounds(algorithm, self.place)
        self.state = engine.put_on_devices(algorithm.init(jax.random.key(1)), self.place)
        self.key = engine.put_on_devices(jax.random.key(2), self.place)
        self.call(0)

    def call(self, k):
        """Run one call of prepared rounds; return the seconds a round."""
        ready = self.prepared[k % len(self.prepared)]
        begin = time.perf_counter()
        self.state, _, metrics = self.run_rounds(self.state, (), ready.cohorts, self.key, ready.first, ROUNDS_AT_ONCE)
        jax.block_until_ready((self.state, metrics))
        return (time.perf_counter() - begin) / ROUNDS_AT_ONCE

    def call_with_preparation(self, k):
        """Do what the training loop does: prepare the next call's cohorts while this call runs."""
        begin = time.perf_counter()
        ready = self.prepared[k % len(self.prepared)]
        self.state, _, metrics = self.run_rounds(self.state, (), ready.cohorts, self.key, ready.first, ROUNDS_AT_ONCE)
        ahead = self.cohorts.prepare_ahead((k + 1) * ROUNDS_AT_ONCE, ROUNDS_AT_ONCE)
        jax.block_until_ready((self.state, metrics))
        self.prepared[(k + 1) % len(self.prepared)] = ahead.result()
        return (time.perf_counter() - begin) / ROUNDS_AT_ONCE


class CRounds:
    """The same rounds in C, on the same clients."""

    def __init__(self, ratings, rounds):
        import numpy as np

        from c_loop import CLoop

        table = np.asarray(jax.tree.leaves(rounds.state.method.params)[0])
        self.loop = CLoop(table, batch=BATCH, most_steps=STEPS, rate_reconstruct=0.1, rate_update=0.5)
        self.columns = (np.ascontiguousarray(ratings.columns["item"]), np.ascontiguousarray(ratings.columns["rating"]))
        self.calls, steps = [], []
        for ready in rounds.prepared:
            call = []
            for drawn in ready.samples:
                begins, ends = (np.ascontiguousarray(x[drawn.clients]) for x in (ratings.starts, ratings.ends))
                users = np.random.default_rng(0).uniform(-0.05, 0.05, (len(begins), DIM)).astype(np.float32)
                batches = -(-(ends - begins) // BATCH)
                steps.append(int(np.minimum(STEPS, (batches + 1) // 2).sum() + np.minimum(STEPS, batches // 2).sum()))
                call.append((begins, ends, *self.columns, users))
            self.calls.append(call)
        self.steps = statistics.mean(steps)

    def call(self, k):
        """Run one call's rounds; return the seconds a round."""
        begin = time.perf_counter()
        for arrays in self.calls[k % len(self.calls)]:
            self.loop.round(*arrays)
        return (time.perf_counter() - begin) / ROUNDS_AT_ONCE


def in_turn(runners, times):
    """Time runners one after another, again and again; return the median seconds of each."""
    seconds = {name: [] for name in runners}
    for k in range(times):
        for name, call in runners.items():
            call(k)  # once to be warm: the runner before has had the caches
            seconds[name].append(call(k + 1))
    return {name: statistics.median(all_) for name, all_ in seconds.items()}


def bench_rounds(ratings):
    rounds = Rounds(ratings, algorithm(ratings.num_items))
    c = CRounds(ratings, rounds)
    found = in_turn({"fedrecon": rounds.call, "c": c.call}, 30)
    ratio = found["fedrecon"] / found["c"]
    figures = {name: 1e3 * seconds for name, seconds in found.items()} | {"ratio": ratio, "steps": c.steps}
    figures["microseconds_a_step"] = 1e6 * found["fedrecon"] / c.steps
    rows = [
        ("C loop, one thread", f"{figures['c']:.2f} ms a round", ""),
        (
            f"fedrecon, {rounds.place.jax_devices} devices, blocks of {rounds.place.block}",
            f"{figures['fedrecon']:.2f} ms a round, {figures['microseconds_a_step']:.2f} us a step",
            "",
        ),
        ("ratio", f"{ratio:.1f}", "at most 6, aiming for 5"),
    ]
    return rows, figures


def bench_optimizers(ratings):
    import optax

    kinds = {
        "sgd": optax.sgd(0.5),
        "momentum": optax.sgd(0.1, momentum=0.9),
        "adagrad": optax.adagrad(0.1),
        "adam": optax.adam(0.01),
    }
    runners = {name: Rounds(ratings, algorithm(ratings.num_items, kind)).call for name, kind in kinds.items()}
    found = in_turn(runners, 15)
    rows = [
        (
            name,
            f"{1e3 * seconds:.2f} ms a round, {seconds / found['sgd']:.2f} times SGD",
            "" if name == "adam" else "at most 4 times SGD",
        )
        for name, seconds in found.items()
        if name != "sgd"
    ]
    return rows, {name: 1e3 * seconds for name, seconds in found.items()}


def bench_packing(ratings):
    rounds = Rounds(ratings, algorithm(ratings.num_items))
    found = in_turn({"rounds": rounds.call, "with preparation": rounds.call_with_preparation}, 30)
    begin = time.thread_time()
    for k in range(10):
        rounds.cohorts.prepare(k * ROUNDS_AT_ONCE, ROUNDS_AT_ONCE)
    alone = (time.thread_time() - begin) / 10 / ROUNDS_AT_ONCE
    share = found["with preparation"] / found["rounds"] - 1
    figures = {name: 1e3 * seconds for name, seconds in found.items()} | {"alone": 1e3 * alone, "share": share}
    return [("added to the rounds", f"{share:.0%} ({1e3 * alone:.2f} ms of one core a round)", "below 20%")], figures


def bench_devices(ratings):
    if len(jax.devices()) < 2:
        return [("two devices", "not measured: one core", "at least 1.4 times one")], {}
    rows, figures = [], {}
    for clients in (CLIENTS, 10 * CLIENTS):
        runners = {
            f"{n} devices": Rounds(ratings, algorithm(ratings.num_items), clients=clients, devices=n, block=10).call
            for n in (1, 2)
        }
        found = in_turn(runners, 30 * CLIENTS // clients + 5)
        gain = found["1 devices"] / found["2 devices"]
        figures[f"{clients} clients"] = {name: 1e3 * s for name, s in found.items()} | {"gain": gain}
        rows.append(
            (
                f"{clients} clients a round",
                f"{gain:.2f} times ({1e3 * found['1 devices']:.2f} and {1e3 * found['2 devices']:.2f} ms)",
                "at least 1.4 times",
            )
        )
    return rows, figures


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["rounds", "optimizers", "packing", "devices"])
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    from fedrecon import start_jax_devices

    start_jax_devices()
    ratings = setup(arguments.data)
    rows, figures = globals()[f"bench_{arguments.part}"](ratings)
    arguments.json.write_text(json.dumps({"rows": rows, "figures": figures}))


if __name__ == "__main__":
    main()
