"""Serving: people with 100 ratings each, from ratings to ten recommendations, compiled and warm."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import fedrecon as fr

PEOPLE, RATINGS, TIMES = 1000, 100, 5


def people(model, number, rng):
    """Draw people who have rated items at random."""
    ids = model.items.ids.tolist()
    known = min(RATINGS, len(ids) // 2)
    return [
        {ids[k]: float(rng.integers(1, 6)) for k in rng.choice(len(ids), known, replace=False)} for _ in range(number)
    ]


def seconds_of(model, some):
    begin = time.perf_counter()
    model.recommend(some, 10)
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    fr.start_jax_devices()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedrecon", "train", arguments.data, "--out", folder]
        command += ["--rounds", "2", "--evaluate-every", "0"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        model = fr.recommend.load(folder)
    rng = np.random.default_rng(0)
    many, one = (people(model, number, rng) for number in (PEOPLE, 1))
    first = seconds_of(model, many)
    seconds_of(model, one[0])
    together = statistics.median(seconds_of(model, people(model, PEOPLE, rng)) for _ in range(TIMES))
    alone = statistics.median(seconds_of(model, people(model, 1, rng)[0]) for _ in range(TIMES))
    rows = [
        (f"{PEOPLE} people with {RATINGS} ratings", f"{PEOPLE / together:.0f} a second", "at least 1000 a second"),
        ("one person", f"{1000 * alone:.0f} ms", ""),
        ("the first call, which compiles", f"{first:.1f} s", ""),
    ]
    figures = {"together": together, "alone": alone, "first": first}
    arguments.json.write_text(json.dumps({"rows": rows, "figures": figures}))


if __name__ == "__main__":
    main()
