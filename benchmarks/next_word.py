"""Next words: a training step of the paper's model, its reconstruction, and a whole training, against PyTorch."""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VOCABULARY, EMBEDDING, HIDDEN, PROJECTION, BATCH, LENGTH = 10_000, 96, 670, 96, 16, 20
BUCKETS = 500
STEPS = 5  # of one call
SUPPORT_STEPS = 2
# A whole training: rounds, clients in each, sentences of a client (a tenth is support), words of a sentence.
ROUNDS, PER_ROUND, SENTENCES, WORDS = 40, 8, 150, 12
WRITTEN = 200  # sentences of a person who is reconstructed


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
        self.run = compile_each(lambda params, part: algorithm.method.reconstruct(params, (), *part), place)
        self.steps = number * SUPPORT_STEPS

    def call(self):
        """Return the seconds a step of one client."""
        import jax

        begin = time.perf_counter()
        jax.block_until_ready(self.run(self.shared, (self.support, self.keys)))
        return (time.perf_counter() - begin) / self.steps


def text_model(local="output_bias"):
    """Return an untrained model of the default settings with made-up words, or one with another local part."""
    import dataclasses

    import jax
    import numpy as np

    from fedrecon._src.recommend.config import TEXT_DEFAULT, Reconstruct
    from fedrecon._src.recommend.saved_models import SavedModel
    from fedrecon._src.recommend.tasks import TEXT
    from fedrecon.data import Vocabulary

    settings = dataclasses.replace(TEXT_DEFAULT.model, local=local)
    solver = TEXT_DEFAULT.reconstruct if local == "output_bias" else Reconstruct()
    config = dataclasses.replace(TEXT_DEFAULT, model=settings, reconstruct=solver)
    words = Vocabulary(tuple(f"w{k}" for k in range(settings.vocabulary)), settings.oov_buckets)
    params = TEXT.build_model(config, words).init_global(jax.random.key(0))
    return SavedModel(config, jax.tree.map(np.asarray, params), words)


def written_sentences(vocabulary):
    """Return a person's sentences of 2 to 20 words; the later a word, the rarer, and 6% are outside the vocabulary."""
    generator = random.Random(0)
    words, weights = vocabulary.words, [1 / (k + 1) for k in range(len(vocabulary))]
    return [
        [
            f"own{generator.randrange(50)}" if generator.random() < 0.06 else word
            for word in generator.choices(words, weights, k=generator.randint(2, LENGTH))
        ]
        for _ in range(WRITTEN)
    ]


def columns_of(saved):
    """Return the same sentences as examples of a model."""
    from fedrecon.data import personal_text

    text = "\n".join(" ".join(words) for words in written_sentences(saved.legend))
    return personal_text(text, saved.legend, saved.config.model.max_words).columns


class PersonalStep:
    """Training steps of the default text model with a local part that is reconstructed already."""

    def __init__(self, local):
        import jax
        import numpy as np

        import fedrecon as fr
        from fedrecon._src.core.cohort import Packer

        saved = text_model(local)
        method, columns = saved.algorithm.method, columns_of(saved)
        person = fr.Clients.from_columns(columns, client=np.zeros(WRITTEN, int))
        cohort = jax.device_put(Packer(person, method.needs).pack(np.array([0])))
        params, key = jax.device_put(saved.params), jax.random.key(1)
        self.given = params, method.stages.prepare(params, (), cohort, key), cohort, key
        self.run = jax.jit(lambda *given: method.stages.finish(*given)[0])
        self.steps = saved.config.update.steps

    def call(self):
        """Return the seconds a step."""
        import jax

        begin = time.perf_counter()
        jax.block_until_ready(self.run(*self.given))
        return (time.perf_counter() - begin) / self.steps


class Person:
    """One person of the default text model, reconstructed in closed form."""

    def __init__(self):
        saved = text_model()
        self.given = saved.algorithm, saved.params, columns_of(saved)

    def call(self):
        """Return the seconds of a reconstruction."""
        import fedrecon as fr

        begin = time.perf_counter()
        fr.reconstruct(*self.given)
        return time.perf_counter() - begin


class TorchTraining:
    """The default model and rounds of `fedrecon train --task text` as a plain PyTorch loop.

    A client copies the global parameters, takes eight clipped steps of SGD and returns its change; the server adds the
    mean. Tables have sparse gradients, and the softmax has two levels. Nothing is personal.
    """

    def __init__(self):
        import torch

        from fedrecon._src.data.sentences import PAIR_ROWS
        from fedrecon._src.recommend.config import TEXT_DEFAULT

        self.torch, self.pair_rows, model = torch, PAIR_ROWS, TEXT_DEFAULT.model
        torch.manual_seed(0)
        self.inputs, self.steps = model.vocabulary + 3, TEXT_DEFAULT.update.steps
        self.tables = torch.nn.ModuleList(
            torch.nn.Embedding(rows, width, sparse=True)
            for rows, width in (
                (self.inputs + model.oov_buckets, model.embedding),
                (self.inputs, model.projection),
                (PAIR_ROWS, model.projection),
            )
        )
        self.lstm = torch.nn.LSTM(model.embedding, model.hidden, batch_first=True)
        self.projection = torch.nn.Linear(model.hidden, model.projection)
        outputs, cutoffs = self.inputs + model.oov_buckets, [model.head, model.vocabulary]
        self.output = torch.nn.AdaptiveLogSoftmaxWithLoss(model.projection, outputs, cutoffs, div_value=1.0)
        self.layers = torch.nn.ModuleList([self.tables, self.lstm, self.projection, self.output])
        self.rate, self.max_norm = TEXT_DEFAULT.update.learning_rate, TEXT_DEFAULT.update.clip_norm

    def step(self, words):
        """Take one step on sentences of words."""
        torch = self.torch
        inputs, targets = words[:, :-1], words[:, 1:]
        pairs = (torch.roll(inputs, 1, 1) * 31 + inputs) % self.pair_rows
        embedding, bigrams, trigrams = self.tables
        hidden = self.projection(self.lstm(embedding(inputs))[0]) + bigrams(inputs) + trigrams(pairs)
        self.layers.zero_grad()
        self.output(hidden.flatten(0, 1), targets.flatten()).loss.backward()
        parameters = [parameter for parameter in self.all() if parameter.grad is not None]  # a group may have no target
        gradients = [each.grad.coalesce() if each.grad.is_sparse else each.grad for each in parameters]
        norms = [(each.values() if each.is_sparse else each).norm() for each in gradients]
        scale = min(1.0, self.max_norm / float(torch.stack(norms).norm()))
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.add_(gradient, alpha=-self.rate * scale)

    def all(self):
        """Return all parameters."""
        return list(self.layers.parameters())

    def call(self):
        """Return the seconds of all rounds."""
        torch = self.torch
        words = torch.randint(0, self.inputs, (PER_ROUND, self.steps, BATCH, WORDS + 2))
        begin = time.perf_counter()
        for _ in range(ROUNDS):
            start = [parameter.detach().clone() for parameter in self.all()]
            total = [torch.zeros_like(parameter) for parameter in start]
            for client in words:
                for batch in client:
                    self.step(batch)
                with torch.no_grad():
                    for parameter, before, change in zip(self.all(), start, total, strict=True):
                        change += parameter - before
                        parameter.copy_(before)
            with torch.no_grad():
                for parameter, change in zip(self.all(), total, strict=True):
                    parameter += change / PER_ROUND
        return time.perf_counter() - begin


def write_corpus(path, people=200):
    """Write sentences of Zipf-distributed words, all of the same length."""
    generator = random.Random(0)
    words = [f"w{chr(97 + k % 26)}{chr(97 + k // 26 % 26)}{chr(97 + k // 676)}" for k in range(8000)]
    weights = [1 / (k + 1) for k in range(len(words))]
    with path.open("w") as file:
        for person in range(people):
            for moment in range(SENTENCES):
                text = " ".join(generator.choices(words, weights, k=WORDS)) + "."
                file.write(json.dumps({"client": f"p{person}", "time": moment, "text": text}) + "\n")


def bench_training():
    from fedrecon._src.recommend.config import TEXT_DEFAULT

    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "posts.jsonl")
        command = [sys.executable, "-m", "fedrecon", "train", str(Path(folder) / "posts.jsonl"), "--task", "text"]
        command += ["--sampling.clients-per-round", str(PER_ROUND), "--patience", "None"]
        seconds = []
        for rounds in (ROUNDS, ROUNDS, 2 * ROUNDS):  # the first fills the cache of compiled programs
            options = ["--rounds", str(rounds), "--evaluate-every", str(rounds), "--out", f"{folder}/{len(seconds)}"]
            begin = time.perf_counter()
            subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - begin)
    tokens = ROUNDS * PER_ROUND * TEXT_DEFAULT.update.steps * BATCH * (WORDS + 1)
    figures = {"whole": 2 * tokens / seconds[2], "rounds": tokens / (seconds[2] - seconds[1])}
    rows = [
        (f"fedrecon train, {2 * ROUNDS} rounds, start to saved model", f"{figures['whole']:,.0f} tokens a second", ""),
        ("its rounds alone", f"{figures['rounds']:,.0f} tokens a second", ""),
    ]
    try:
        figures["PyTorch"] = tokens / TorchTraining().call()
        ratio = figures["rounds"] / figures["PyTorch"]
        rows.append(("rounds in PyTorch", f"{figures['PyTorch']:,.0f}: fedrecon has {ratio:.2f} times that", ""))
    except ImportError:
        rows.append(("rounds in PyTorch", "not installed", ""))
    return rows, figures


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


def bench_person():
    """Measure what is personal in the default text model; `main` has restricted this process to one core."""
    found = in_turn({"person": Person()}, 9)
    found |= in_turn({"with": PersonalStep("output_bias"), "without": PersonalStep("nothing")}, 25)
    figures = {name: 1e3 * seconds for name, seconds in found.items()}
    ratio = found["with"] / found["without"]
    step = f"{figures['with']:.2f} ms, without {figures['without']:.2f}: {ratio:.2f} times that"
    rows = [
        (f"a person with {WRITTEN} sentences, default model, one core", f"{figures['person']:.0f} ms", "100 ms"),
        ("a training step with a personal output bias, one core", step, "at most 1.10 times"),
    ]
    return rows, figures


def on_one_core():
    """Run `bench_person` in a process of its own, since JAX has already started here with all cores."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        subprocess.run([sys.executable, __file__, "person", "--json", str(out)], check=True)
        found = json.loads(out.read_text())
    return [tuple(row) for row in found["rows"]], found["figures"]


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
    personal_rows, personal = on_one_core()
    return rows + personal_rows, {name: 1e3 * seconds for name, seconds in found.items()} | personal


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["step", "reconstruction", "person", "training"])
    parser.add_argument("--data", help="not used: only shapes matter")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.part == "person":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX starts its threads
    from fedrecon import start_jax_devices

    # A step is one client's and has all cores to itself; a cohort is divided among devices.
    start_jax_devices(1 if arguments.part == "step" else None, small_loops=False)
    rows, figures = globals()[f"bench_{arguments.part}"]()
    arguments.json.write_text(json.dumps({"rows": rows, "figures": figures}))


if __name__ == "__main__":
    main()
