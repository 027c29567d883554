"""Training over devices on one machine: a coordinator, a helper, and fifty devices with one real person's ratings each.

A model of half of MovieLens small's users comes first. Then devices train it further: some in Python, some in node.js
where that is installed, and you in your browser. Some devices leave, some answer for rounds nobody asked them about.

python examples/devices/demo.py --out devices-demo
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SCRIPTS = ROOT / "src-device" / "fedrecon_device" / "web"
RUNTIME = ROOT / "tests" / "web" / "node_modules" / "onnxruntime-web" / "dist"  # `make devices-demo` installs it
# Gentle rates, chosen by looking at the error printed in the end: it shows that rounds work, not how much they help.
TRAINING = "--preset paper --model.dim 8 --model.biases --model.init-mean 3.5 --reconstruct.solver least-squares "
TRAINING += "--reconstruct.ridge 2 --update.learning-rate 0.1 --server.learning-rate 10 --evaluate-every 0"
LONGEST = 900  # seconds, whatever happens


@dataclass(frozen=True)
class Scale:
    """How large a demonstration is.

    Attributes:
      devices: how many devices.
      least: the fewest reports of a sum.
      per_round: how many close a round; fewer than there are devices, since some are gone.
      rounds: how many.
      start_rounds: of the model that devices begin with.
      examples: how many ratings of a person are used.
    """

    devices: int = 50
    least: int = 20
    per_round: int = 30
    rounds: int = 10
    start_rounds: int = 2
    examples: int = 100


SMALL = Scale(devices=8, least=3, per_round=5, rounds=2, start_rounds=2, examples=20)


def fedrecon(*words: object) -> list[str]:
    """Return a command line."""
    return [sys.executable, "-m", "fedrecon", *map(str, words)]


def call(*words: object) -> str:
    """Run a command of fedrecon in this process, and return what it prints."""
    from fedrecon._src.app.cli import main as run

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = run([str(word) for word in words])
    if code:
        raise SystemExit(f"fedrecon {words[0]} failed: {printed.getvalue()}")
    return printed.getvalue()


def write_people(folder: Path, devices: int) -> list[dict[str, list[Any]]]:
    """Write half of the users to start.csv and those whom no device has to unseen.csv; return the devices' ratings."""
    from fedrecon._src.data import load

    ratings = load("movielens-small")
    people = [
        {"item": ratings.item_ids[person["item"]].tolist(), "rating": person["rating"].tolist()} for person in ratings
    ]
    with (folder / "titles.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("item", "title"))
        writer.writerows((item, ratings.title(k)) for k, item in enumerate(ratings.item_ids.tolist()))
    parts = {"start.csv": people[::2], "unseen.csv": people[1::2][devices:]}
    for name, some in parts.items():
        with (folder / name).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("user", "item", "rating"))
            for user, person in enumerate(some):
                writer.writerows((user, *pair) for pair in zip(person["item"], person["rating"], strict=True))
    return people[1::2][:devices]


def make_keys(folder: Path) -> str:
    """Make what `fedrecon keys` makes, and return the helper's public key."""
    from fedrecon._src.deploy import certificates

    certificates.make_authority(folder)
    certificates.make_server(folder, ())
    certificates.make_token_secret(folder)
    certificates.make_node(folder / "nodes", "coordinator")
    return certificates.make_helper(folder).read_text().strip()


def measure(model: Path, ratings: Path) -> float:
    """Return the RMSE of a model on people whom it has never seen: half of their ratings from the other half."""
    return json.loads(call("evaluate", model, "--ratings", ratings, "--json"))["micro"]["rmse"]


def free_port() -> int:
    """Return a port that nobody uses now, below those that the system gives to outgoing connections meanwhile."""
    for port in random.SystemRandom().sample(range(15_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise SystemExit("no port is free")


class Demo:
    """The processes of one demonstration and where their files are."""

    def __init__(self, folder: Path, scale: Scale):
        """Name the files, and choose ports."""
        self.folder, self.scale = folder, scale
        self.keys, self.bundle, self.start = folder / "keys", folder / "bundle", folder / "start"
        self.server, self.helper = (f"https://127.0.0.1:{free_port()}" for _ in range(2))
        self.processes: list[subprocess.Popen[Any]] = []

    @property
    def secret(self) -> bytes:
        """With which tokens are issued."""
        from fedrecon._src.deploy.admission import read_secret

        return read_secret(self.keys / "tokens.key")

    def prepare(self) -> list[dict[str, list[Any]]]:
        """Train the model to begin with, and bundle it; return the devices' ratings."""
        people, public = write_people(self.folder, self.scale.devices), make_keys(self.keys)
        data, titles = self.folder / "start.csv", ("--titles", self.folder / "titles.csv")
        call("train", data, "--out", self.start, *titles, *TRAINING.split(), "--rounds", self.scale.start_rounds)
        page = ("--onnxruntime-web", RUNTIME) if RUNTIME.is_dir() else ()
        terms = {
            "rounds": self.scale.rounds,
            "helper": public,
            "least": self.scale.least,
            "most": 4 * self.scale.devices,
            "reports-per-day": 1000,
        }
        options = [word for name, value in terms.items() for word in (f"--devices.{name}", value)]
        call("bundle", self.start, "--train", "--out", self.bundle, "--examples", self.scale.examples, *options, *page)
        return people

    def begin(self, name: str, command: list[str], settings: Any = None, **environment: str) -> subprocess.Popen[bytes]:
        """Start a process that logs to a file of its own."""
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | environment,
            )
        self.processes.append(process)
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings).encode())
        process.stdin.close()
        return process

    def start_helper(self) -> None:
        """Start the second server; another organisation would run it."""
        known = self.keys / "nodes" / "coordinator.pub"
        options = ("--key", self.keys / "helper.key", "--coordinator", known, "--state", self.folder / "helper")
        listen = ("--listen", self.helper.removeprefix("https://"), "--keys", self.keys)
        self.begin("helper", fedrecon("helper", self.bundle / "plan.json", *options, *listen))

    def start_coordinator(self, run: Path, begin_with: Path, *, slow: bool = False) -> subprocess.Popen[bytes]:
        """Start the first server; slow rounds stay open until their deadline, for people who join by hand."""
        options = {
            "run": begin_with,
            "tokens": self.keys / "tokens.key",
            "helper": self.helper,
            "helper-ca": self.keys / "ca.crt",
            "sign": self.keys / "nodes" / "coordinator.key",
            "retry": 5 if slow else 1,
        }
        words = [word for name, value in options.items() for word in (f"--devices.{name}", value)]
        reports = 4 * self.scale.devices if slow else self.scale.per_round
        pace = ("--per-round", reports, "--deadline", 20, "--wait", 300, "--status", "none")
        listen = ("--listen", self.server.removeprefix("https://"), "--keys", self.keys, "--out", run)
        return self.begin(run.name, fedrecon("serve", self.bundle, *listen, *words, *pace))

    def start_devices(self, people: Sequence[dict[str, list[Any]]]) -> str:
        """Start the devices, a third of them in node.js if it is there; return who they are."""
        from fedrecon.deploy import issue_token
        from fedrecon_device import Bundle

        stores = self.folder / "devices"
        stores.mkdir()
        devices = [
            {
                "store": str(stores / f"{k}.json"),
                "token": issue_token(self.secret, f"device-{k}"),
                "ratings": person,
                "rounds": 3 if k % 10 == 4 else None,  # a tenth leaves after three rounds
                "stray": k % 10 == 7,  # a tenth sends nonsense
            }
            for k, person in enumerate(people)
        ]
        common = {"bundle": str(self.bundle), "server": self.server, "authority": str(self.keys / "ca.crt")}
        has_node = shutil.which("node") is not None and RUNTIME.is_dir()
        in_node = [device for device in devices[::3] if not device["stray"]] if has_node else []
        in_python = [device for device in devices if device not in in_node]
        script = [sys.executable, str(HERE / "devices.py")]
        for number, some in enumerate((in_python[::2], in_python[1::2])):
            self.begin(f"python{number}", script, common | {"devices": some})
        if in_node:
            index = Bundle(self.bundle).items.index
            for device in in_node:
                known = [(index[i], r) for i, r in zip(*device["ratings"].values(), strict=True) if i in index]
                items, ratings = zip(*known, strict=True)
                device["columns"] = {"item": items, "rating": ratings}
            settings = common | {"scripts": str(SCRIPTS), "runtime": str(RUNTIME), "devices": in_node}
            command = ["node", str(HERE / "devices.mjs")]
            self.begin("node", command, settings, NODE_EXTRA_CA_CERTS=str(self.keys / "ca.crt"))
        return f"{len(in_python)} devices in Python, {len(in_node)} in node.js"

    @contextlib.contextmanager
    def page(self) -> Iterator[str | None]:
        """Serve the page; yields its address, None where the packages of npm are missing."""
        if not RUNTIME.is_dir():
            yield None
            return
        sys.path.insert(0, str(HERE))
        from page_server import PageServer

        with PageServer(self.bundle, self.server, self.secret, self.keys / "ca.crt") as site:
            yield site.address

    def end(self) -> None:
        """End every process that was started."""
        for process in reversed(self.processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def rounds_of(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run's rounds."""
    file = run / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == "round"]


def follow(demo: Demo, run: Path, coordinator: subprocess.Popen[bytes], longest: float) -> None:
    """Print every round as it ends, until the coordinator has."""
    printed, end = 0, time.monotonic() + longest
    while True:
        ended = coordinator.poll() is not None
        for record in rounds_of(run)[printed:]:
            printed += 1
            lost = record["late"] + sum(record["failed"].values())
            print(
                f"round {record['round']}: {record['answered']} reports, {lost} too late, {record['seconds']:.1f} s",
                flush=True,
            )
        if ended:
            break
        if time.monotonic() > end:
            raise SystemExit(f"the demonstration took longer than {longest:.0f} s; logs are in {demo.folder}")
        time.sleep(0.2)
    if coordinator.returncode:
        raise SystemExit(f"the coordinator failed:\n{(demo.folder / f'{run.name}.log').read_text()[-2000:]}")


def demonstrate(folder: Path, scale: Scale, stay: bool) -> None:
    """Make everything, train, measure, and wait for the reader."""
    began = time.monotonic()
    demo = Demo(folder, scale)
    people = demo.prepare()
    print(f"a model of half of the users, and a bundle for devices: {time.monotonic() - began:.0f} s", flush=True)
    run = folder / "run"
    try:
        demo.start_helper()
        coordinator = demo.start_coordinator(run, demo.start)
        with demo.page() as address:
            print(demo.start_devices(people), flush=True)
            if address is not None:
                print(f"take part yourself: rate a few films and turn the switch on at {address}", flush=True)
            before = measure(demo.start, folder / "unseen.csv")
            follow(demo, run, coordinator, LONGEST)
            after = measure(run, folder / "unseen.csv")
            print(f"RMSE on unseen people: {before:.4f} before, {after:.4f} after {scale.rounds} rounds on devices")
            print(f"it took {time.monotonic() - began:.0f} s; {folder} has a log of each process", flush=True)
            number = 1
            while stay and address is not None:
                print(f"training goes on, so that you can join at {address}; Ctrl-C ends it", flush=True)
                number += 1
                last, run = run, folder / f"run{number}"
                follow(demo, run, demo.start_coordinator(run, last, slow=True), float("inf"))
    except KeyboardInterrupt:
        print("ended")
    finally:
        demo.end()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("devices-demo"), help="the folder; an earlier demo is replaced"
    )
    parser.add_argument("--small", action="store_true", help="few devices and rounds, for a test")
    parser.add_argument(
        "--stay", action="store_true", help="go on until Ctrl-C, so that you can take part in a browser"
    )
    args = parser.parse_args(argv)
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)  # devices must not outlive the demonstration
    mark = args.out / ".devices-demo"
    if args.out.exists():
        if not mark.exists():
            parser.error(f"{args.out} is not an earlier demo; give another folder with --out")
        shutil.rmtree(args.out)
    args.out.mkdir(parents=True)
    mark.touch()
    demonstrate(args.out.resolve(), SMALL if args.small else Scale(), args.stay)
    return 0


if __name__ == "__main__":
    sys.exit(main())
