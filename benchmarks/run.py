"""Measure speed and memory: `python benchmarks/run.py`, or `make bench`.

    python benchmarks/run.py                          # everything, on synthetic data
    python benchmarks/run.py --data ml-1m.zip         # the same on MovieLens 1M
    python benchmarks/run.py --only rounds devices    # some of it

Every part runs in its own process, one after another. Things that are compared run in turn in one process, and the
result is a ratio, since machines are noisy.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PARTS = {
    "rounds": ("W1 rounds against a C loop", ["w1.py", "rounds"]),
    "optimizers": ("client optimizers", ["w1.py", "optimizers"]),
    "packing": ("preparing cohorts", ["w1.py", "packing"]),
    "devices": ("two devices against one", ["w1.py", "devices"]),
    "methods": ("methods against federated averaging", ["methods.py"]),
    "frameworks": ("matrix factorization in other frameworks", ["frameworks.py"]),
    "population": ("10 thousand to 10 million clients", ["population.py"]),
    "text-step": ("next word: a training step", ["next_word.py", "step"]),
    "text-reconstruction": ("next word: reconstruction", ["next_word.py", "reconstruction"]),
    "text-training": ("next word: a whole training", ["next_word.py", "training"]),
    "device": ("bundles for devices", ["device.py"]),
    "secure-sum": ("a secure sum", ["secure_sum.py"]),
    "device-rounds": ("rounds over devices", ["secure_sum.py", "--devices", "--length", "50000"]),
    "train": ("fedrecon train with the paper's settings, start to saved model", ["train_command.py", "paper"]),
    "train-default": ("fedrecon train without options, start to saved model", ["train_command.py", "default"]),
    "deployment": ("a deployment with four nodes on loopback", ["deployment.py"]),
    "availability": ("who is heard, of 10 million clients", ["availability.py"]),
    "serving": ("from ratings to recommendations", ["serving.py"]),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="synthetic", help="a MovieLens 1M zip or folder; made-up data without")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts to run")
    parser.add_argument("--json", type=Path, default=Path("bench.json"), help="where to write all figures")
    arguments = parser.parse_args()
    rows, figures = [], {}
    for name in arguments.only:
        title, command = PARTS[name]
        print(f"{title} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "figures.json"
            script = [sys.executable, str(HERE / command[0]), *command[1:]]
            subprocess.run([*script, "--data", arguments.data, "--json", str(out)], check=True)
            found = json.loads(out.read_text())
        figures[name] = found["figures"]
        rows += [(title, *row) for row in found["rows"]]
    show(rows)
    machine = {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    arguments.json.write_text(json.dumps({"machine": machine, "data": arguments.data, **figures}, indent=2) + "\n")
    print(f"all figures: {arguments.json}")


def show(rows):
    from rich.console import Console
    from rich.table import Table

    table = Table("part", "what", "measured", "aim")
    last = None
    for title, what, measured, aim in rows:
        table.add_row(title if title != last else "", what, measured, aim)
        last = title
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
