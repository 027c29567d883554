"""Kill a training over and over, with `kill -9` at its file operations, and see that nothing is lost.

    python tests/kill.py --kills 50 --seed 0

Two things are killed: `fedrecon train` that replaces an older run (`--overwrite`, then `--resume`), and training whose
clients keep something. After every kill a model can be opened, and it is that of the run that `run.json` describes.
Whatever comes to its end has the same bits as if it had never been killed. Every life is a fork of this process, which
itself never starts JAX, so that a life begins at once.
"""

import argparse
import collections
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

import jax
import numpy as np
import optax

import fedrecon as fr
from fedrecon._src.app.cli import main
from fedrecon._src.app.experiment import read_run
from fedrecon._src.recommend.saved_models import open_model
from fedrecon._src.storage.atomic import StorageError
from fedrecon._src.storage.run_folder import list_stashes

EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}
OPTIONS = ["--rounds", "24", "--checkpoint-every", "3", "--evaluate-every", "5", "--model.dim", "2"]
OPTIONS += ["--sampling.clients-per-round", "4", "--jax-devices", "1", "--data.fractions", "0.6", "0.2", "0.2"]
AT_RANDOM_TIMES = 0.2  # share of kills that do not wait for a file operation


class Trap:
    """Counts the file operations within a folder, and kills the process at one of them."""

    def __init__(self, folder, at, report):
        self.folder, self.at, self.report, self.seen = str(folder), at, report, 0

    def __call__(self, event, args):
        if event not in EVENTS or not self._within(event, args):
            return
        self.seen += 1
        os.pwrite(self.report, f"{self.seen:8} {event:12}".encode(), 0)
        if self.seen == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def _within(self, event, args):
        if event == "open":
            path, mode, flags = args
            writes = bool(set(mode or "") & set("wax+")) or bool(flags & (os.O_WRONLY | os.O_RDWR))
            return writes and self._ours(path)
        inside = event in ("os.remove", "os.rmdir") and args[-1] != -1  # of a folder that is being removed
        return inside or any(self._ours(path) for path in args)

    def _ours(self, path):
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder)


def live(what, work, *, folder=None, at=None, seconds=None):
    """Run `what` in a fork; kill it at an operation in the folder, or after some seconds.

    Returns the exit code, the number of operations, and the last of them.
    """
    report = os.open(work / "report", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    child = os.fork()
    if child == 0:
        code = 70
        try:
            output = os.open(work / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if folder is not None:
                sys.addaudithook(Trap(folder, at, report))
            code = what()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    words = os.pread(report, 100, 0).split() or [b"0", b"start"]
    os.close(report)
    return status, int(words[0]), words[1].decode() if seconds is None else "at a random time"


class Command:
    """`fedrecon train`, replacing one run by another in turn."""

    name = "fedrecon train --overwrite, --resume"

    def __init__(self, work):
        self.work, self.folder, self.seed = work, work / "run", 1
        rng = np.random.default_rng(0)
        rows = [f"u{u},{i},{rng.integers(1, 6)}" for u in range(20) for i in rng.choice(12, 8, replace=False)]
        (work / "ratings.csv").write_text("\n".join(["user,item,rating", *rows]) + "\n")
        for seed in (0, 1):
            whole = work / f"whole-{seed}"
            status, self.operations, _ = live(self._train(whole, seed), work, folder=whole)
            assert status == 0, (work / "output").read_text()
        shutil.copytree(work / "whole-0", self.folder)

    def _train(self, folder, seed, *options):
        command = ["train", str(self.work / "ratings.csv"), "--out", str(folder), "--seed", str(seed), *OPTIONS]
        return lambda: main([*command, *options])

    def live(self, **kill):
        again = read_run(self.folder)[0].seed == self.seed
        options = ["--resume", str(self.folder)] if again else ["--overwrite"]
        return live(self._train(self.folder, self.seed, *options), self.work, **kill)

    def check(self):
        """Check what a killed process has left: one run with its model, or the old one still put aside."""
        seed = read_run(self.folder)[0].seed
        try:
            found = open_model(self.folder)
        except StorageError as problem:
            if "has no model yet" not in str(problem):
                raise
            assert list_stashes(self.folder), "the old run is gone before the new one is complete"
            assert seed == self.seed
        else:
            whole = open_model(self.work / f"whole-{seed}")
            pairs = zip(jax.tree.leaves(found.params), jax.tree.leaves(whole.params), strict=True)
            assert all(one.tobytes() == other.tobytes() for one, other in pairs), seed
        return 0

    def finished(self):
        """Check that what has come to its end is the same to the bit; then begin to replace it."""
        whole = self.work / f"whole-{self.seed}"
        for name in ("model/global.safetensors", "model/model.json", "metrics.jsonl"):
            assert (self.folder / name).read_bytes() == (whole / name).read_bytes(), name
        mine, other = (json.loads((folder / "run.json").read_text()) for folder in (self.folder, whole))
        assert mine["test"] == other["test"]
        assert not list_stashes(self.folder)
        self.seed = 1 - self.seed


class Library:
    """Training whose clients keep their local parameters."""

    name = "fr.train with clients that keep something"

    def __init__(self, work):
        self.work, self.folder, self.turn = work, work / "library-0", 0
        whole = work / "library-whole"
        status, self.operations, _ = live(lambda: self._train(whole), work, folder=whole)
        assert status == 0, (work / "output").read_text()

    def _train(self, folder):
        rng = np.random.default_rng(0)
        columns = {
            "item": np.concatenate([rng.permutation(12)[:6] for _ in range(6)]).astype(np.int32),
            "rating": rng.integers(1, 6, 36).astype(np.float32),
        }
        descend = fr.gradient_descent(optax.sgd(0.1), batch_size=2, epochs=1)
        model = fr.models.matrix_factorization(12, dim=2)
        algorithm = fr.federated_averaging(model, update=descend, server=optax.sgd(1.0), reconstruct=descend)
        found = fr.train(
            algorithm,
            fr.Clients.from_columns(columns, np.repeat(np.arange(6), 6)),
            rounds=24,
            clients_per_round=3,
            folder=fr.RunFolder(folder, checkpoint_every=2),
            layout=fr.layout(block=1, jax_devices=1),
        )
        leaves = [np.ravel(leaf) for leaf in jax.tree.leaves((found.params, found.client_state))]
        np.save(folder.with_suffix(".npy"), np.concatenate(leaves))
        return 0

    def live(self, **kill):
        return live(lambda: self._train(self.folder), self.work, **kill)

    def check(self):
        for private in self.folder.glob("checkpoint/*/private"):
            assert private.stat().st_mode & 0o077 == 0
        return 0

    def finished(self):
        whole = self.work / "library-whole"
        assert (self.folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
        assert np.load(self.folder.with_suffix(".npy")).tobytes() == np.load(whole.with_suffix(".npy")).tobytes()
        self.turn += 1
        self.folder = self.work / f"library-{self.turn}"


def kill_often(subject, kills, rng, counts):
    """Kill a subject so many times, check it every time, and in the end let it live. Return how many came to an end."""
    ended = done = 0
    status, typical = None, 5.0
    while done < kills or status != 0:
        kill = {} if done == kills else {"folder": subject.folder, "at": int(rng.integers(1, subject.operations))}
        if kill and rng.random() < AT_RANDOM_TIMES:
            kill = {"seconds": rng.uniform(0, typical)}
        began = time.monotonic()
        status, _, event = subject.live(**kill)
        if status == 0:
            typical = time.monotonic() - began
            subject.finished()
            ended += 1
        elif status == -signal.SIGKILL:
            done += 1
            counts[event] += 1
        else:
            raise AssertionError(f"exit code {status} after {done} kills: {(subject.work / 'output').read_text()}")
        assert live(subject.check, subject.work)[0] == 0, (subject.work / "output").read_text()
    return ended


def run(kills, seed):
    """Kill both subjects and say what happened."""
    counts = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="fedrecon-kill-") as work:
        jax.config.update("jax_compilation_cache_dir", str(Path(work) / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        for part, kind in enumerate((Command, Library)):
            rng = np.random.default_rng([seed, part])
            number = kills - kills // 2 if part == 0 else kills // 2
            subject = kind(Path(work))
            ended = kill_often(subject, number, rng, counts)
            print(f"{kind.name}: {number} kills, {ended} runs came to an end, all with the same bits", flush=True)
    print("killed at: " + ", ".join(f"{event} {number}" for event, number in counts.most_common()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    run(arguments.kills, arguments.seed)
