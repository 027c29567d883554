"""Seconds per round of every method of the study of relatives, against federated averaging in the same process."""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # for `studies`, which is not installed

DIM, CLIENTS, BATCH, ROUNDS, RATE = 16, 100, 5, 200, 0.1


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    from studies.relatives import METHODS, methods_of

    task = make_ratings(arguments.data)
    averaging = METHODS["fedavg"][1](task, RATE)  # the same object, so that it is compiled once
    figures, rows = {}, []
    before = time_rounds(averaging, task)
    for name in methods_of("ratings"):
        title, make = METHODS[name]
        # Machines are noisy, so each method is compared with averaging before and after it.
        seconds, after = time_rounds(make(task, RATE), task), time_rounds(averaging, task)
        figures[name] = {"milliseconds": 1e3 * seconds, "times_averaging": 2 * seconds / (before + after)}
        before = after
        ratio = figures[name]["times_averaging"]
        rows.append((title, f"{1e3 * seconds:.1f} ms a round, {ratio:.1f} times FedAvg", ""))
        print(*rows[-1], file=sys.stderr, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "figures": figures}))


def make_ratings(source):
    """Return ratings as a task: a factorization whose user part is local, or the same for all."""
    from studies.relatives import all_global, make_task

    import fedrecon as fr

    ratings = fr.data.load(source).shuffle(0).cap(100)
    model = fr.models.matrix_factorization(ratings.num_items, DIM, biases=True, init_mean=3.5)
    parts = ratings.split_clients(0.8, 0.1, 0.1, seed=0)
    return make_task(*parts, split=model, whole=all_global(model), batch_size=BATCH, per_round=CLIENTS)


def time_rounds(algorithm, task):
    """Return the seconds of a round, compiling left out: from the first records of a training to its last."""
    import fedrecon as fr

    class Clock(fr.Callback):
        def __init__(self):
            self.times = []

        def after_round(self, record):
            self.times.append(time.perf_counter())

    clock = Clock()
    fr.train(algorithm, task.train, rounds=ROUNDS, clients_per_round=CLIENTS, callbacks=[clock])
    # Several rounds may be one call, whose records come together: count from the end of the first call.
    first = max(i for i, moment in enumerate(clock.times) if moment - clock.times[0] < 1e-3)
    return (clock.times[-1] - clock.times[first]) / (ROUNDS - 1 - first)


if __name__ == "__main__":
    main()
