"""What `test_several_hosts.py` runs, in one process with two devices or in two with one: prints what came out, as JSON.

python tests/hosts_program.py FOLDER                     # one process
python tests/hosts_program.py FOLDER 127.0.0.1:PORT 0    # the first of two, and 1 for the other
"""

import hashlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax

import fedrecon as fr
from fedrecon._src.app.cli import main

ITEMS = 30
STEPS = fr.gradient_descent(optax.sgd(0.1), batch_size=5, steps=3)
TEXT = ["--task", "text", "--model.vocabulary", "5", "--model.oov-buckets", "4", "--model.max-words", "5"]
TEXT += ["--model.hidden", "4", "--model.embedding", "4", "--model.projection", "4"]
TEXT += ["--reconstruct.steps", "2", "--update.steps", "2", "--sampling.clients-per-round", "3"]
TEXT += ["--data.fractions", "0.4", "0.3", "0.3", "--rounds", "4", "--evaluate-every", "2", "--checkpoint-every", "2"]


def clients():
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 20, 41)
    ends = np.cumsum(sizes)
    columns = {
        "item": rng.integers(0, ITEMS, ends[-1]).astype(np.int32),
        "rating": rng.normal(size=ends[-1]).astype(np.float32),
    }
    return fr.Clients(columns, ends - sizes, ends)


def digest(tree):
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def reconstructs():
    """Train and evaluate; nothing is kept, so several rounds are one call."""
    algorithm = fr.federated_reconstruction(
        fr.models.matrix_factorization(ITEMS, 4), reconstruct=STEPS, update=STEPS, server=optax.adam(0.1)
    )
    run = fr.train(
        algorithm, clients(), rounds=5, clients_per_round=11, valid=fr.Validation(clients(), every=3), seed=1
    )
    found = fr.evaluate(algorithm, run.params, clients(), seed=2)
    return {"params": digest(run.params), "history": run.history, "evaluation": digest(found.per_client)}


def keeps(folder):
    """Train clients that keep their parameters, in a folder; stop, and go on from it."""
    algorithm = fr.federated_averaging(
        fr.models.matrix_factorization(ITEMS, 4), update=STEPS, reconstruct=STEPS, server=optax.sgd(1.0)
    )
    common = {"clients_per_round": 7, "seed": 1}
    fr.train(algorithm, clients(), rounds=4, folder=fr.RunFolder(folder / "kept", checkpoint_every=2), **common)
    run = fr.train(algorithm, clients(), rounds=7, folder=fr.RunFolder(folder / "kept", checkpoint_every=2), **common)
    found = fr.evaluate(algorithm, run.params, clients(), client_state=run.client_state, protocol="standard")
    return {
        "params": digest(run.params),
        "client_state": digest(run.client_state),
        "history": run.history,
        "test": found.summary(),
    }


def reads(folder):
    """Train on text with the command."""
    posts = [
        {"client": f"client{c:02}", "time": t, "text": f"w{(c * t) % 4} name{c} name{c} ."}
        for c in range(20)
        for t in range(4)
    ]
    source = folder / f"posts{jax.process_index()}.jsonl"
    source.write_text("".join(json.dumps(post) + "\n" for post in posts))
    assert main(["train", str(source), "--out", str(folder / "text"), *TEXT]) == 0


def ranks():
    """Train on clicks, with products of matrices that XLA divides among its threads."""
    rng = np.random.default_rng(0)
    columns = {"item": rng.integers(0, 1000, 400).astype(np.int32)}
    clicks = fr.Clients.from_columns(columns, client=np.repeat(np.arange(40), 10))
    algorithm = fr.federated_ials(
        fr.models.ranking_factorization(1000, 64), unobserved=0.4, ridge=1.0, server=optax.adam(0.1)
    )
    return digest(fr.train(algorithm, clicks, rounds=4, clients_per_round=20, seed=1).params)


def serves():
    """Reconstruct for a single client, in one process only: nobody waits for the others."""
    algorithm = fr.federated_reconstruction(
        fr.models.matrix_factorization(ITEMS, 4), reconstruct=STEPS, update=STEPS, server=optax.sgd(1.0)
    )
    params = algorithm.params(algorithm.init(jax.random.key(0)))
    examples = {"item": np.arange(4, dtype=np.int32), "rating": np.ones(4, np.float32)}
    return digest(fr.reconstruct(algorithm, params, examples))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        fr.start_hosts(sys.argv[2], 2, int(sys.argv[3]), jax_devices=1, timeout=60)
    else:
        fr.start_jax_devices(2)
    found = {"reconstruction": reconstructs(), "averaging": keeps(folder), "ranking": ranks()}
    if jax.process_index() == 0:
        found["served"] = serves()
    reads(folder)
    print(json.dumps(found, allow_nan=True))
