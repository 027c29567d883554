"""Several processes run one simulation: they give the bits of one, and end when another dies."""

import ast
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import fedrecon as fr
from deployed import free_port
from fedrecon._src.app.cli import train
from fedrecon._src.simulation import multihost
from fedrecon._src.simulation.engine import MOST_IN_BLOCK, MOST_ON_ACCELERATOR, MOST_SHARING, blocks_for

HERE = Path(__file__).parent
LONG = 240  # seconds after which a process that should have ended is killed
SMALL = ["--rounds", "300", "--checkpoint-every", "2", "--evaluate-every", "100", "--preset", "paper"]
SMALL += ["--model.dim", "4", "--reconstruct.steps", "2", "--update.steps", "2", "--sampling.clients-per-round", "8"]


@contextlib.contextmanager
def started(*commands, **environment):
    """Start processes in groups of their own; leave none behind."""
    processes = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        for command in commands
    ]
    try:
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def ended(process, within=LONG):
    """Return the exit code, output and errors of a process that ends by itself."""
    out, err = process.communicate(timeout=within)
    return process.returncode, out, err


def two(command):
    """Return a training command for each of two processes."""
    where = ["--distributed.coordinator", f"127.0.0.1:{free_port()}", "--distributed.processes", "2"]
    where += ["--distributed.timeout", "20", "--jax-devices", "1"]
    return [["-m", "fedrecon", *command, *where, "--distributed.process-id", str(k)] for k in range(2)]


def write_ratings(path):
    rng = np.random.default_rng(0)
    rows = [f"{u},{i},{rng.integers(1, 6)}" for u in range(40) for i in rng.permutation(20)[:8]]
    path.write_text("user,item,rating\n" + "\n".join(rows) + "\n")
    return path


# ---- the same bits ----


@pytest.mark.slow
def test_two_processes_give_the_bits_of_one_with_two_devices(tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    program, cache = HERE / "hosts_program.py", {"FEDRECON_CACHE": str(tmp_path / "cache")}
    with started([program, alone], **cache) as (one,):
        code, out, err = ended(one)
        assert code == 0, err
    expected = json.loads(out.splitlines()[-1])
    where = f"127.0.0.1:{free_port()}"
    with started(*([program, together, where, k] for k in range(2)), **cache) as processes:
        results = [ended(process) for process in processes]
    for code, out, err in results:
        assert code == 0, err
        found = json.loads(out.splitlines()[-1])
        assert found["reconstruction"] == expected["reconstruction"]
        assert found["averaging"] == expected["averaging"]
        assert found["ranking"] == expected["ranking"]
    assert json.loads(results[0][1].splitlines()[-1])["served"] == expected["served"]
    shown = [line for line in results[1][1].splitlines()[:-1] if not line.startswith("[Gloo]")]
    assert not shown, "only the first shows what it does"
    for name in ("kept/metrics.jsonl", "text/metrics.jsonl", "text/model/global.safetensors"):
        assert (together / name).read_bytes() == (alone / name).read_bytes(), name
    tests = [json.loads((folder / "text" / "run.json").read_text())["test"] for folder in (alone, together)]
    assert tests[0] == tests[1]
    assert tests[0]["clients"]


# ---- who dies ----


def wait_for_a_checkpoint(processes, run):
    """Wait until a run has a newer checkpoint than it has now."""
    until, before = time.monotonic() + LONG, newest(run)
    while newest(run) <= before:
        assert time.monotonic() < until
        assert processes[0].poll() is None, processes[0].communicate()
        time.sleep(0.01)


def newest(run):
    return max((int(path.name[6:]) for path in (run / "checkpoint").glob("round-*[0-9]")), default=0)


@pytest.mark.slow
def test_a_killed_process_ends_the_other_and_both_resume_to_the_same_bits(tmp_path):
    ratings, run, alone = write_ratings(tmp_path / "ratings.csv"), tmp_path / "run", tmp_path / "alone"
    command = ["train", str(ratings), "--out", str(run), *SMALL]
    with started(*two(command)) as processes:  # Ctrl-C reaches every process of a launcher
        wait_for_a_checkpoint(processes, run)
        for process in processes:
            process.send_signal(signal.SIGINT)
        results = [ended(process, within=60) for process in processes]
    assert [code for code, _, _ in results] == [130, 130], results
    assert "to continue: fedrecon train" in results[0][2]
    assert json.loads((run / "run.json").read_text())["interrupted"] is True
    for victim in (1, 0):
        with started(*two([*command, "--resume", str(run)])) as processes:
            wait_for_a_checkpoint(processes, run)
            os.killpg(processes[victim].pid, signal.SIGKILL)
            code, _, err = ended(processes[1 - victim], within=120)
        assert code != 0, err
    with started(*two([*command, "--resume", str(run)])) as processes:
        results = [ended(process) for process in processes]
    assert [code for code, _, _ in results] == [0, 0], results
    facts = json.loads((run / "run.json").read_text())
    assert len(facts["resumed"]) == 3
    assert facts["layout"]["processes"] == 2
    with started(["-m", "fedrecon", "train", ratings, "--out", alone, "--jax-devices", "2", *SMALL]) as (one,):
        code, _, err = ended(one)
        assert code == 0, err
    whole, parts = (load_file(folder / "model" / "global.safetensors") for folder in (alone, run))
    assert {name: leaf.tobytes() for name, leaf in whole.items()} == {n: leaf.tobytes() for n, leaf in parts.items()}
    assert (run / "metrics.jsonl").read_bytes() == (alone / "metrics.jsonl").read_bytes()
    assert facts["test"] == json.loads((alone / "run.json").read_text())["test"]


@pytest.mark.slow
def test_all_processes_report_the_error_of_the_first_one(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    ratings = write_ratings(tmp_path / "ratings.csv")
    with started(*two(["train", str(ratings), "--out", str(tmp_path / "run"), *SMALL])) as processes:
        results = [ended(process) for process in processes]
    assert [code for code, _, _ in results] == [1, 1]
    first, second = (err.strip().splitlines()[-1] for _, _, err in results)
    assert second.endswith(first.removeprefix("fedrecon: "))
    assert second.startswith("fedrecon: the first process failed: ")


START = "import sys, jax, fedrecon as fr\nfr.start_hosts(sys.argv[1], 2, int(sys.argv[2]), jax_devices=1, timeout=60)\n"
AGREE = """
from fedrecon._src.simulation import multihost

def failure(function, *arguments):
    try:
        function(*arguments)
    except Exception as problem:
        return type(problem).__name__, str(problem)

k = jax.process_index()
value = multihost.broadcast(lambda: {"process": k, "loss": 0.1})
broken = failure(multihost.broadcast, lambda: 1 / 0)
differs = failure(multihost.check_same, {"seed": k, "rounds": 3})
multihost.check_same({"rounds": 3})
print([value, broken, differs])
"""


@pytest.mark.slow
def test_processes_agree_on_values_errors_and_settings():
    where = f"127.0.0.1:{free_port()}"
    with started(*(["-c", START + AGREE, where, k] for k in range(2))) as both:
        results = [ended(process) for process in both]
    assert [code for code, _, _ in results] == [0, 0], results
    first, second = (ast.literal_eval(out.splitlines()[-1]) for _, out, _ in results)
    assert first[0] == second[0] == {"process": 0, "loss": 0.1}
    assert first[1][0] == "ZeroDivisionError"
    assert second[1] == ("HostError", "the first process failed: division by zero")
    assert first[2][0] == second[2][0] == "HostError"
    assert "'seed' is 1; expected 0" in second[2][1]


def test_folders_of_all_kinds_are_shared_once(tmp_path, monkeypatch):
    class Mirrored(fr.RunFolder):
        """A user's own kind of folder."""

    folder = Mirrored(tmp_path)
    assert multihost.share_folder(folder) is folder
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    shared = multihost.share_folder(folder)
    assert shared is not folder
    assert multihost.share_folder(shared) is shared


@pytest.mark.slow
def test_a_process_that_has_used_jax_before_is_refused():
    program = START.replace("\n", "\njax.devices()\n", 1)
    with started(["-c", program, f"127.0.0.1:{free_port()}", 0]) as (process,):
        code, _, err = ended(process)
    assert code == 1
    assert "HostError" in err


@pytest.mark.slow
@pytest.mark.parametrize("options", [("node1:8476", 2, None), ("node1:8476", 2, 2), (None, None, None)])
def test_a_process_without_a_number_of_its_own_is_refused(options):
    with started(["-c", f"import fedrecon as fr\nfr.start_hosts(*{options}, timeout=5)"]) as (process,):
        code, _, err = ended(process)
    assert code == 1
    assert "HostError: `coordinator`, `processes` and `process`" in err


def test_the_files_to_start_from_have_options_that_there_are():
    examples = HERE.parent / "examples" / "hosts"
    script = (examples / "train.sbatch").read_text().replace("\\\n", " ")
    command = next(line for line in script.splitlines() if line.startswith("srun "))
    found = train.parse(shlex.split(command.split(" fedrecon train ")[1]))
    assert found.distributed == "auto"
    assert found.resume
    job = (examples / "kubernetes.yaml").read_text()
    arguments = re.findall(r"^ +- (\S+)(?: +#.*)?$", job[job.index("args:") : job.index("resources:")], re.MULTILINE)
    assert arguments[0] == "train"
    found = train.parse([argument.replace("$(JOB_COMPLETION_INDEX)", "3") for argument in arguments[1:]])
    assert found.processes.coordinator == "fedrecon-0.fedrecon:8476"
    assert (found.processes.processes, found.processes.process_id) == (4, 3)
    assert found.resume


# ---- arrays and blocks ----


def test_what_the_first_process_has_arrives_bit_by_bit():
    tree = {
        "floats": np.array([-0.0, np.nan, np.inf, 1e-45], np.float32),
        "long": np.array([[2**62 + 1], [-1]]),
        "scalar": np.float64(np.pi),
        "flags": np.array([True, False, True]),
        "none": np.zeros((0, 3), np.float32),
    }
    found = multihost.broadcast_arrays(tree)
    for name, leaf in tree.items():
        assert found[name].dtype == leaf.dtype
        assert found[name].shape == leaf.shape
        assert found[name].tobytes() == leaf.tobytes()


def test_one_process_has_all_clients_of_a_cohort():
    layout = fr.layout(2)
    order = layout.arrange(np.arange(11), np.arange(11))
    assert layout.processes == 1
    assert layout.local(order) is order


def test_keys_and_arrays_are_copied_to_every_device():
    found = multihost.make_global({"key": jax.random.key(3), "number": 4, "row": np.arange(3)}, fr.layout().mesh)
    assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(jax.random.key(3)).tolist()
    assert int(found["number"]) == 4
    assert found["row"].is_fully_replicated
    assert len(found["row"].devices()) == jax.device_count()


def test_blocks_follow_the_cache_on_a_cpu_and_the_memory_of_an_accelerator():
    assert blocks_for(0, 100, None) == (MOST_IN_BLOCK, MOST_IN_BLOCK)
    assert blocks_for(2**20, 100, None) == (1, MOST_SHARING)
    assert blocks_for(2**20, 100, 2**35) == (MOST_ON_ACCELERATOR, MOST_ON_ACCELERATOR)
    assert blocks_for(2**28, 100, 2**35) == (4, MOST_ON_ACCELERATOR)  # 8 GB for blocks, 8 copies of 256 MB a client
    assert blocks_for(2**28, 2**30, 2**35) == (4, 8)  # local parameters of 1 GB: 8 clients in 8 GB
