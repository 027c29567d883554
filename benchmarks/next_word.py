"""The next word model at the paper's size: a training step against PyTorch and its matrix products, and blocks."""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

VOCABULARY, EMBEDDING, HIDDEN, PROJECTION, BATCH, LENGTH = 10_000, 96, 670, 96, 16, 20
BUCKETS = 500
STEPS = 5  # of one call
SUPPORT_STEPS = 2


def clients(number, steps, buckets, *, natural=False):
    """Return clients with sentences of random words.

    All sentences are full; or, as in blogs with this vocabulary, three tenths are and the others have any length, and
    6% of the words are outside of it.
    """
    import numpy as np

    import fedrecon as fr

    generator = np.random.default_rng(0)
    shape = (number * steps * BATCH, LENGTH)
    word, target = (generator.integers(1, VOCABULARY + 1, shape) for _ in range(2))
    oov = np.where(generator.random(shape) < 0.06, generator.integers(1, buckets + 1, shape), 0)
    columns = {"word": np.where(oov > 0, 0, word), "oov": oov, "target": target}
    if natural:
        lengths = np.where(generator.random(shape[0]) < 0.3, LENGTH, generator.integers(2, LENGTH, shape[0]))
        there = np.arange(LENGTH) < lengths[:, None]
        columns = {name: np.where(there, column, 0) for name, column in columns.items()}
    columns = {name: column.astype(np.int32) for name, column in columns.items()}
    ends = (1 + np.arange(number)) * steps * BATCH
    return fr.Clients(columns, ends - steps * BATCH, ends)


class Step:
    """Training steps as a client takes them: loss, metrics, the gradient of everything, SGD."""

    def __init__(self):
        import jax
        import numpy as np
        import optax

        import fedrecon as fr
        from fedrecon._src.core.cohort import Packer

        model = fr.models.next_word(VOCABULARY, 1, local="nothing")
        descent = fr.gradient_descent(optax.sgd(0.3), batch_size=BATCH)
        algorithm = fr.federated_averaging(model, update=descent, server=optax.sgd(1.0))
        self.cohort = jax.device_put(Packer(clients(1, STEPS, 1), algorithm.method.needs).pack(np.array([0])))
        self.params, self.key = model.init_global(jax.random.key(0)), jax.random.key(1)
        self.run = jax.jit(lambda params, cohort, key: algorithm.method.client(params, (), cohort, key)[0])

    def call(self):
        """Return the seconds a step."""
        import jax

        begin = time.perf_counter()
        jax.block_until_ready(self.run(self.params, self.cohort, self.key))
        return (time.perf_counter() - begin) / STEPS


class Products:
    """Only the matrix products of the same step, each on its own inputs, the recurrent ones one after another."""

    def __init__(self):
        import jax
        import jax.numpy as jnp

        rows, gates, outputs = BATCH * LENGTH, 4 * HIDDEN, VOCABULARY + 4
        # (rows of the result, summed over, columns), how often
        forward = [(rows, EMBEDDING, gates, 1), (BATCH, HIDDEN, gates, LENGTH), (rows, HIDDEN, PROJECTION, 1)]
        forward.append((rows, PROJECTION, outputs, 1))
        backward = [(m, n, k, times) for m, k, n, times in forward]  # of the inputs
        weights = [(k, m * times, n, 1) for m, k, n, times in forward]
        shapes = forward + backward + weights
        self.pairs = [(jnp.ones((m, k)), jnp.ones((k, n))) for m, k, n, _ in shapes]
        times = [each for *_, each in shapes]

        def all_products(pairs):
            def again(a, b, number):
                # Each product needs the one before, so that none is left out or moved out of the loop.
                def one(_, carry):
                    a, _ = carry
                    product = a @ b
                    return a + product[0, 0] * 1e-9, product

                return jax.lax.fori_loop(0, number, one, (a, jnp.zeros((a.shape[0], b.shape[1]))))[1]

            def once(_, total):
                return total + sum(again(a + total, b, n)[0, 0] for (a, b), n in zip(pairs, times, strict=True)) * 1e-9

            return jax.lax.fori_loop(0, STEPS, once, jnp.zeros(()))

        self.run = jax.jit(all_products)

    def call(self):
        """Return the seconds that the products of a step take."""
        import jax

        begin = time.perf_counter()
        jax.block_until_ready(self.run(self.pairs))
        return (time.perf_counter() - begin) / STEPS


class TorchStep:
    """The same step in PyTorch."""

    def __init__(self, threads):
        import torch

        self.torch, self.threads = torch, threads
        torch.manual_seed(0)
        outputs = VOCABULARY + 4
        self.embedding = torch.nn.Embedding(outputs, EMBEDDING)
        self.lstm = torch.nn.LSTM(EMBEDDING, HIDDEN, batch_first=True)
        self.head = torch.nn.Sequential(torch.nn.Linear(HIDDEN, PROJECTION), torch.nn.Linear(PROJECTION, outputs))
        layers = torch.nn.ModuleList([self.embedding, self.lstm, self.head])
        self.optimizer = torch.optim.SGD(layers.parameters(), 0.3)
        self.loss = torch.nn.CrossEntropyLoss(ignore_index=0)
        self.words, self.targets = (torch.randint(1, VOCABULARY + 1, (STEPS, BATCH, LENGTH)) for _ in range(2))

    def call(self):
        """Return the seconds a step."""
        self.torch.set_num_threads(self.threads)
        begin = time.perf_counter()
        for words, targets in zip(self.words, self.targets, strict=True):
            self.optimizer.zero_grad()
            logits = self.head(self.lstm(self.embedding(words))[0])
            self.loss(logits.flatten(0, 1), targets.flatten()).backward()
            self.optimizer.step()
        return (time.perf_counter() - begin) / STEPS


class Reconstruction:
    """Reconstruction of 16 clients with the global part frozen, on one layout."""

    def __init__(self, place, number=16):
        import jax
        import numpy as np
        import optax

        import fedrecon as fr
        from fedrecon._src.core.cohort import Needs, Packer
        from fedrecon._src.simulation.engine import compile_each, put_on_devices

        model = fr.models.next_word(VOCABULARY, BUCKETS)
        descent = fr.gradient_descent(optax.sgd(0.1), batch_size=BATCH)
        algorithm = fr.federated_reconstruction(model, reconstruct=descent, update=descent, server=optax.sgd(1.0))
        people = clients(number, SUPPORT_STEPS, BUCKETS, natural=True)
        place = place or fr.layout(model=model)
        order = place.arrange(np.arange(number), np.asarray(people.sizes))
        cohort = Packer(people, Needs(fr.split.support_only())).pack(order)
        self.shared = put_on_devices(model.init_global(jax.random.key(0)), place)
        self.support, self.keys = cohort.support, jax.random.split(jax.random.key(1), len(order))
        self.run = compile_each(lambda params, part: algorithm.reconstruct(params, (), *part), place)
        self.steps = number * SUPPORT_STEPS

    def call(self):
        """Return the seconds a step of one client."""
        import jax

        begin = time.perf_counter()
        jax.block_until_ready(self.run(self.shared, (self.support, self.keys)))
        return (time.perf_counter() - begin) / self.steps


def in_turn(runners, times):
    """Time runners one after another, again and again; return the median seconds of each."""
    seconds = {name: [] for name in runners}
    for _ in range(times):
        for name, runner in runners.items():
            runner.call()  # once to be warm: the runner before has had the caches
            seconds[name].append(runner.call())
    return {name: statistics.median(all_) for name, all_ in seconds.items()}


def bench_step():
    runners = {"fedrecon": Step(), "products": Products()}
    cores = len(os.sched_getaffinity(0))
    try:
        import torch

        own = torch.get_num_threads()  # as PyTorch chooses
        runners |= {f"PyTorch, {n} threads": TorchStep(n) for n in sorted({own, cores})}
    except ImportError:
        torch = None
    found = in_turn(runners, 9)
    figures = {name: 1e3 * seconds for name, seconds in found.items()}
    rows = [("fedrecon", f"{figures['fedrecon']:.1f} ms a step", "")]
    for name in runners:
        if name == "fedrecon":
            continue
        aim = "at most 2.2 times" if name == "products" else "at most 1.15 times"
        aim = f"{aim} (where there is no PyTorch)" if name == "products" and torch else aim
        ratio = found["fedrecon"] / found[name]
        figures[f"times {name}"] = ratio
        title = "its matrix products alone" if name == "products" else name
        rows.append((title, f"{figures[name]:.1f} ms: fedrecon takes {ratio:.2f} times that", aim))
    if torch is None:
        rows.append(("PyTorch", "not installed", "at most 1.15 times"))
    return rows, figures


def bench_reconstruction():
    import fedrecon as fr

    runners = {
        "one client at a time": Reconstruction(fr.layout(1, 1)),
        "one client at a time on each core": Reconstruction(fr.layout(1)),
        "16 clients": Reconstruction(None),
    }
    found = in_turn(runners, 7)
    rows = [
        (name, f"{1e3 * seconds:.1f} ms a step of a client, {found['one client at a time'] / seconds:.2f} times", "")
        for name, seconds in found.items()
    ]
    rows[-1] = (*rows[-1][:2], "at least 1.5 times one client at a time")
    return rows, {name: 1e3 * seconds for name, seconds in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["step", "reconstruction"])
    parser.add_argument("--data", help="not used: only shapes matter")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    from fedrecon import start_jax_devices

    # A step is one client's and has all cores to itself; a cohort is divided among devices.
    start_jax_devices(1 if arguments.part == "step" else None)
    rows, figures = globals()[f"bench_{arguments.part}"]()
    arguments.json.write_text(json.dumps({"rows": rows, "figures": figures}))


if __name__ == "__main__":
    main()
