"""One simulation in several processes, from Python.

    python examples/hosts/train.py 127.0.0.1:8476 2 0     # in one terminal
    python examples/hosts/train.py 127.0.0.1:8476 2 1     # in another
    srun python examples/hosts/train.py                   # SLURM says the same

All processes run this program. Each packs and runs its share of the clients; all end with the same parameters.
"""

import sys

import jax
import optax

import fedrecon as fr

if len(sys.argv) > 1:
    fr.start_hosts(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
else:
    fr.start_hosts()

ratings = fr.data.load("synthetic").shuffle(0)
solver = fr.gradient_descent(optax.sgd(0.1), batch_size=5, steps=50)
algorithm = fr.federated_reconstruction(
    fr.models.matrix_factorization(ratings.num_items), reconstruct=solver, update=solver, server=optax.sgd(1.0)
)
run = fr.train(algorithm, ratings, rounds=20, clients_per_round=100, folder="runs/several")
if jax.process_index() == 0:
    print(f"{jax.device_count()} devices of {jax.process_count()} processes: loss {run.history[-1]['loss']:.3f}")
