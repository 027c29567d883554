"""Gateways on one machine, Flower, and a coordinator that trains over them, by one command.

    fedrecon plan --items catalogue.csv --out plan --preset quick
    python examples/deploy/gateways.py plan --out gateways --gateways 2
    fedrecon join ratings.csv --server http://127.0.0.1:PORT --insecure     # a port that the command prints

Needs `pip install 'fedrecon[deploy,flower]'`, or --bin with Flower's programs. Nothing is encrypted.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any


def load_starter() -> Any:
    """Return examples/flower/start.py, which knows Flower."""
    path = Path(__file__).resolve().parent.parent / "flower" / "start.py"
    spec = importlib.util.spec_from_file_location("start_flower", path)
    assert spec is not None
    assert spec.loader is not None
    starter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(starter)
    return starter


def start_gateway(plan: Path, folder: Path, number: int, port: int, min_nodes: int = 1) -> subprocess.Popen[bytes]:
    """Start a gateway for nodes at a port; it is asked at its socket in the folder."""
    serve = [
        sys.executable,
        "-m",
        "fedrecon",
        "serve",
        plan,
        "--insecure",
        "--min-nodes",
        min_nodes,
        "--status",
        "none",
    ]
    own = ["--gateway", folder / f"gateway{number}.sock", "--out", folder / f"gateway{number}"]
    with (folder / f"gateway{number}.log").open("ab") as log:
        command = [*map(str, [*serve, *own, "--listen", f"127.0.0.1:{port}"])]
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def main() -> int:
    """Start everything, wait until training is over, and stop everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument(
        "--out", type=Path, default=Path("gateways"), help="the folder for everything; run/ is the run's"
    )
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--bin", type=Path, default=Path(sys.executable).parent, help="where Flower's programs are")
    args = parser.parse_args()
    starter, folder = load_starter(), args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    ports = [starter.free_port() for _ in range(args.gateways)]
    started = [start_gateway(args.plan, folder, number, port) for number, port in enumerate(ports)]
    try:
        for number, port in enumerate(ports):
            print(f"gateway {number}: fedrecon join FILE --server http://127.0.0.1:{port} --insecure", flush=True)
        sockets = [folder / f"gateway{number}.sock" for number in range(args.gateways)]
        started += starter.start(folder / "flower", args.bin, folder / "grid.sock", sockets, "")
        serve = [sys.executable, "-m", "fedrecon", "serve", args.plan, "--flower", folder / "grid.sock"]
        pace = ["--min-nodes", args.gateways, "--deadline", 120, "--out", folder / "run", "--resume"]
        return subprocess.run([*map(str, [*serve, *pace])], check=False).returncode
    finally:
        starter.stop(started)


if __name__ == "__main__":
    sys.exit(main())
