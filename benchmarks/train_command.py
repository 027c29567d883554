"""The whole command: `fedrecon train` with the paper's settings or its defaults, from process start to saved model."""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple


class Command(NamedTuple):
    options: list[str]
    what: str
    aim: str
    times: int


PRESETS = {
    "paper": Command(
        ["--preset", "paper", "--rounds", "500", "--evaluate-every", "100"],
        "500 rounds, 5 evaluations",
        "at most 15 s",
        3,
    ),
    "default": Command([], "200 rounds, 4 evaluations", "at most 60 s", 1),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset", choices=list(PRESETS))
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for k in range(PRESETS[arguments.preset].times):
            begin = time.perf_counter()
            command = [sys.executable, "-m", "fedrecon", "train", arguments.data, "--out", str(Path(folder) / str(k))]
            command += PRESETS[arguments.preset].options
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - begin)
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    rows = [
        (PRESETS[arguments.preset].what, f"{statistics.median(seconds):.1f} s", PRESETS[arguments.preset].aim),
        ("memory", f"{memory:.0f} MB", "below 1000 MB"),
    ]
    figures = {"seconds": seconds, "megabytes": memory}
    arguments.json.write_text(json.dumps({"rows": rows, "figures": figures}))


if __name__ == "__main__":
    main()
