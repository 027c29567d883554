"""Start Flower on this machine: a SuperLink, a SuperNode for every Unix socket of a gateway or node, and the app.

    python examples/flower/start.py --grid grid.sock --sockets gateway0.sock gateway1.sock --folder flower

The coordinator is `fedrecon serve PLAN --flower grid.sock --out run`; or give its command with --coordinator, and the
app starts it. Needs `pip install 'fedrecon[flower]'`, or --bin with the programs of another virtualenv. Everything
listens on loopback without encryption: between machines, use the commands in docs/deploy.md. Ctrl-C ends it.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

APP = Path(__file__).resolve().parent
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(folder: Path, bin_folder: Path, grid: Path, sockets: list[Path], coordinator: str) -> list[subprocess.Popen]:
    """Start everything; return the processes, the SuperLink first."""
    folder.mkdir(parents=True, exist_ok=True)
    address = f"127.0.0.1:{free_port()}"
    app = shutil.copytree(APP, folder / "app", dirs_exist_ok=True, ignore=shutil.ignore_patterns("start.py", "*.yaml"))
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = "{address}"\ninsecure = true\n'
    )
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(folder.resolve()), "PATH": path}

    def launch(name: str, *words: object) -> subprocess.Popen:
        with (folder / f"{name}.log").open("ab") as log:
            command = [str(bin_folder / str(words[0])), *map(str, words[1:])]
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    host, port = address.split(":")
    started = [launch("superlink", "flower-superlink", "--insecure", "--host", host, "--port", port)]
    wait_for_port(int(port), started[0])
    for k, path_of_gateway in enumerate(sockets):
        config = f'socket="{path_of_gateway.resolve()}"'
        options = ("--insecure", "--superlink", address, "--port", free_port(), "--node-config", config)
        started.append(launch(f"supernode{k}", "flower-supernode", *options))
    config = f'socket="{grid.resolve()}" command="{coordinator}"'
    run = [bin_folder / "flwr", "run", app, "local", "--run-config", config]
    subprocess.run(list(map(str, run)), env=environment, check=True, timeout=120)
    return started


def wait_for_port(port: int, process: subprocess.Popen, seconds: float = 120) -> None:
    """Wait until a process listens."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.2)
    raise RuntimeError(f"nobody listens at port {port}; see the log of the SuperLink")


def stop(started: list[subprocess.Popen]) -> None:
    """End processes that were started here, and what they started."""
    for process in reversed(started):
        for how in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, how)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    continue


def main() -> None:
    """Start, and wait for Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=Path, required=True, help="the socket at which the coordinator finds the grid")
    parser.add_argument("--sockets", type=Path, nargs="+", required=True, help="of gateways and nodes")
    parser.add_argument("--folder", type=Path, default=Path("flower"), help="for logs and Flower's files")
    parser.add_argument("--bin", type=Path, default=Path(sys.executable).parent, help="where Flower's programs are")
    parser.add_argument("--coordinator", default="", help="a command; --flower SOCKET is added")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = start(args.folder, args.bin, args.grid, args.sockets, args.coordinator)
    try:
        started[0].wait()
    except KeyboardInterrupt:
        pass
    finally:
        stop(started)


if __name__ == "__main__":
    main()
