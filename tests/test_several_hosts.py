"""Several processes run one simulation: to the bits of one, and none is left behind when another dies."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import fedrecon as fr
from fedrecon._src.app.cli import train
from fedrecon._src.simulation.engine import MOST_IN_BLOCK, MOST_ON_ACCELERATOR, MOST_SHARING, blocks_for
from fedrecon._src.simulation.multihost import channel as wire
from fedrecon._src.simulation.multihost import host_arrays as arrays
from fedrecon._src.simulation.multihost import joining, meeting
from fedrecon._src.simulation.multihost.channel import Peer, Wire

HERE = Path(__file__).parent
LONG = 240  # seconds after which a process that should have ended is killed
SMALL = ["--rounds", "300", "--checkpoint-every", "2", "--evaluate-every", "100", "--devices", "2", "--preset", "paper"]
SMALL += ["--model.dim", "4", "--reconstruct.steps", "2", "--update.steps", "2", "--sampling.clients-per-round", "8"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def started(*commands, hosts=None, **environment):
    """Start processes in groups of their own, on this machine or each on one of the `hosts`; leave none behind."""
    prefixes = [["ip", "netns", "exec", host] for host in hosts or ()] or [[]] * len(commands)
    processes = [
        subprocess.Popen(
            [*prefix, sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        for prefix, command in zip(prefixes, commands, strict=True)
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


def two(command, *, wait=60, first="127.0.0.1"):
    """Return a training command for each of two processes."""
    where = ["--distributed.coordinator", f"{first}:{free_port()}", "--distributed.processes", "2"]
    where += ["--distributed.wait", str(wait)]
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
    assert len(results[1][1].splitlines()) == 1, "only the first shows what it does"
    assert not results[1][2]
    assert "Gloo" not in results[0][1] + results[0][2]
    if hasattr(os, "SCHED_BATCH"):
        assert expected["patient"] == 0
        assert all(json.loads(out.splitlines()[-1])["patient"] for _, out, _ in results)
    for name in ("kept/metrics.jsonl", "text/metrics.jsonl", "text/model/global.safetensors"):
        assert (together / name).read_bytes() == (alone / name).read_bytes(), name
    tests = [json.loads((folder / "text" / "run.json").read_text())["test"] for folder in (alone, together)]
    assert tests[0] == tests[1]
    assert tests[0]["clients"]


ADDRESSES = ("198.51.100.1", "198.51.100.2")  # a range for examples


@pytest.fixture
def hosts():
    """Make two hosts with a cable between them: Linux's network namespaces, each with a loopback of its own."""
    if not shutil.which("ip") or os.getuid():
        pytest.skip("network namespaces need Linux's command ip, and root")
    names = [f"fedrecon-{os.getpid()}-{k}" for k in range(2)]
    ends = [f"fr{os.getpid() % 10**6}{k}" for k in "ab"]

    def ip(*arguments):
        return subprocess.run(["ip", *arguments], capture_output=True, text=True)

    made = [ip("netns", "add", name) for name in names]
    made.append(
        ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
    )
    try:
        if failed := [result.stderr.strip() for result in made if result.returncode]:
            pytest.skip(f"this machine makes no network namespaces: {failed[0]}")
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            for arguments in (["addr", "add", f"{address}/24", "dev", end], ["link", "set", end, "up"]):
                assert ip("-n", name, *arguments).returncode == 0
            assert ip("-n", name, "link", "set", "lo", "up").returncode == 0
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)


@pytest.mark.slow
def test_two_hosts_whose_names_stand_for_their_loopbacks_give_the_same_bits(tmp_path, hosts):
    ratings, run, alone = write_ratings(tmp_path / "ratings.csv"), tmp_path / "run", tmp_path / "alone"
    with started(*two(["train", str(ratings), "--out", str(run), *SMALL], first=ADDRESSES[0]), hosts=hosts) as both:
        results = [ended(process) for process in both]
    assert [code for code, _, _ in results] == [0, 0], results
    with started(["-m", "fedrecon", "train", ratings, "--out", alone, *SMALL]) as (one,):
        assert ended(one)[0] == 0
    for name in ("metrics.jsonl", "model/global.safetensors"):
        assert (run / name).read_bytes() == (alone / name).read_bytes(), name


START = "import sys, jax, fedrecon as fr\nfr.start_hosts(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), wait=10)\n"


@pytest.mark.slow
def test_a_process_on_the_first_ones_host_is_found_by_those_on_others(hosts):
    """It calls the first process over the loopback, where nobody else could reach it."""
    calls = [ADDRESSES[0], "127.0.0.1", ADDRESSES[0]]
    program = START.replace("wait=", "devices=3, wait=") + "print(jax.device_count())"
    with started(
        *(["-c", program, f"{address}:7001", 3, k] for k, address in enumerate(calls)), hosts=[hosts[0], *hosts]
    ) as all_three:
        results = [ended(process) for process in all_three]
    assert [(code, out) for code, out, _ in results] == [(0, "3\n")] * 3, results


@pytest.mark.slow
def test_hosts_that_meet_but_have_a_firewall_between_them_say_so(hosts):
    """Only the port of the coordinator is open: the others, which the system chooses, are not."""
    closed = ["rule", "add", "to", ADDRESSES[0], "ipproto", "tcp", "dport", "10000-65534", "prohibit"]
    if subprocess.run(["ip", "-n", hosts[1], *closed], capture_output=True).returncode:
        pytest.skip("this machine's ip has no rules for ports")
    with started(*(["-c", START, f"{ADDRESSES[0]}:7001", 2, k] for k in range(2)), hosts=hosts) as both:
        results = [ended(process, within=60) for process in both]
    assert [code for code, _, _ in results] == [1, 1], results
    for _, _, err in results:
        assert re.search(rf"met the first one at {ADDRESSES[0]}, but cannot connect to port \d+ there", err), results
        assert "Is there a firewall between the hosts?" in err


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has a policy for batch jobs")
def test_only_threads_that_are_started_while_joining_let_others_finish():
    def policy_of_a_new_thread():
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(os.sched_getscheduler, 0).result()

    with joining._patient_threads():
        assert policy_of_a_new_thread() == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert policy_of_a_new_thread() == os.SCHED_OTHER


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
        with started(*two([*command, "--resume"])) as processes:
            wait_for_a_checkpoint(processes, run)
            os.killpg(processes[victim].pid, signal.SIGKILL)
            code, _, err = ended(processes[1 - victim], within=60)
        assert code == 1, err
        assert f"fedrecon: process {victim} on " in err.splitlines()[-1]
        assert "has died" in err
        assert "--resume" in err
    with started(*two([*command, "--resume"])) as processes:
        results = [ended(process) for process in processes]
    assert [code for code, _, _ in results] == [0, 0], results
    assert results[1][1:] == ("", ""), "the second process says nothing"
    facts = json.loads((run / "run.json").read_text())
    assert len(facts["resumed"]) == 3
    assert facts["layout"]["processes"] == 2
    with started(["-m", "fedrecon", "train", ratings, "--out", alone, *SMALL]) as (one,):
        code, _, err = ended(one)
        assert code == 0, err
    whole, parts = (load_file(folder / "model" / "global.safetensors") for folder in (alone, run))
    assert {name: leaf.tobytes() for name, leaf in whole.items()} == {n: leaf.tobytes() for n, leaf in parts.items()}
    assert (run / "metrics.jsonl").read_bytes() == (alone / "metrics.jsonl").read_bytes()
    assert facts["test"] == json.loads((alone / "run.json").read_text())["test"]


@pytest.mark.slow
def test_a_folder_that_the_first_process_refuses_ends_the_other_with_the_same_sentence(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    ratings = write_ratings(tmp_path / "ratings.csv")
    with started(*two(["train", str(ratings), "--out", str(tmp_path / "run"), *SMALL])) as processes:
        results = [ended(process) for process in processes]
    assert [code for code, _, _ in results] == [1, 1]
    first, second = (err.strip() for _, _, err in results)
    assert len(second.splitlines()) == 1
    assert second.endswith(first.removeprefix("fedrecon: "))
    assert second.startswith("fedrecon: process 0 on ")


SILENT = """
import os, signal, sys, time
from fedrecon._src.simulation.multihost import meeting
from fedrecon._src.simulation.multihost import channel as wire
wire.SILENCE, wire.BEAT = 2.0, 0.2
meeting.meet(sys.argv[1], 2, int(sys.argv[2]))
if sys.argv[2] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_process_that_hangs_counts_as_dead():
    where = f"127.0.0.1:{free_port()}"
    with started(*(["-c", SILENT, where, k] for k in range(2))) as (first, _):
        code, _, err = ended(first)
    assert code == 1
    assert "process 1 on " in err
    assert "has not been heard from for 2 seconds" in err


@pytest.fixture
def wires():
    """Return the wires of two processes, both in this one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [socket.create_connection(server.getsockname()), server.accept()[0]]
    with ends[0], ends[1]:
        peers = [Peer(end, 1 - k, f"node{1 - k}") for k, end in enumerate(ends)]
        first, second = (Wire(k, 2, {1 - k: peer}) for k, peer in enumerate(peers))
        yield first, second
        other = threading.Thread(target=second.finish)
        other.start()
        first.finish()
        other.join()
        for peer in peers:
            peer.hang_up()
        for peer in peers:
            peer.close()


def test_the_first_process_decides_what_all_agree_on(wires):
    first, second = wires
    assert (
        first.agree(lambda: {"rounds": 3, "loss": 0.1})
        == second.agree(lambda: "not asked")
        == {"rounds": 3, "loss": 0.1}
    )


def test_a_process_that_was_started_differently_says_in_what(wires):
    first, second = wires
    told = threading.Thread(target=first.check_same, args=({"seed": 0, "rounds": 3},), daemon=True)
    told.start()
    with pytest.raises(fr.HostError, match=r"was not started like process 0 on node0: seed is 1 here and 0 there$"):
        second.check_same({"seed": 1, "rounds": 3})
    assert told.is_alive(), "the first does nothing before all others agree"
    second._tell(same=True)
    told.join()


def test_an_error_of_the_first_process_is_raised_in_the_others(wires, monkeypatch):
    first, second = wires
    monkeypatch.setattr(wire, "VERDICT", 0.0)
    with pytest.raises(ZeroDivisionError):
        first.agree(lambda: 1 / 0)
    with pytest.raises(fr.HostError, match="process 0 on node0: division by zero"):
        second.agree(lambda: None)


@pytest.mark.slow
def test_processes_that_have_used_jax_before_are_refused():
    program, where = START.replace("\n", "\njax.devices()\n", 1), f"127.0.0.1:{free_port()}"
    with started(*(["-c", program, where, 2, k] for k in range(2))) as both:
        results = [ended(process) for process in both]
    assert [code for code, _, _ in results] == [1, 1]
    assert any("processes must meet before anything else uses JAX" in err for _, _, err in results), results


# ---- who does not come ----


def test_whoever_does_not_come_is_named():
    place = meeting.Place("127.0.0.1", free_port(), 3, 0)
    with pytest.raises(fr.HostError, match=r"of 3 processes, 1, 2 did not arrive at 127.0.0.1:\d+ within 0 seconds"):
        meeting._receive(place, 0.1)


def test_a_first_process_that_is_not_there_is_said_to_be_missing():
    place = meeting.Place("127.0.0.1", free_port(), 2, 1)
    with pytest.raises(fr.HostError, match="the first process did not answer"):
        meeting._call(place, 0.1)


def test_strangers_are_ignored_and_a_process_of_another_start_ends_all():
    place, refused = meeting.Place("127.0.0.1", free_port(), 3, 0), []

    def call(process, processes):
        try:
            meeting._call(place._replace(process=process, processes=processes), 5)
        except fr.HostError as problem:
            refused.append(str(problem))

    def come():
        """A stranger, a process that belongs here, and one that was started as one of two."""
        while True:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection((place.host, place.port)) as one:
                one.sendall(b"GET / HTTP/1.1\r\n\r\n")
                break
        ours = threading.Thread(target=call, args=(1, 3))
        ours.start()
        time.sleep(0.2)
        call(2, 2)
        ours.join()

    others = threading.Thread(target=come)
    others.start()
    with pytest.raises(fr.HostError, match="was started as one of 2 processes, the first as one of 3"):
        meeting._receive(place, 10)
    others.join()
    assert len(refused) == 2
    assert len(set(refused)) == 1


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("node1:8476", 2, None), "give all three"),
        (("node1", 2, 0), "expected HOST:PORT"),
        (("node1:http", 2, 0), "expected HOST:PORT"),
        (("node1:8476", 2, 2), "numbered from 0"),
        ((None, None, None), "nothing in the environment says"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused(given, sentence):
    with pytest.raises(fr.HostError, match=sentence):
        meeting.find_place(*given)


def test_slurm_says_which_process_this_is(monkeypatch):
    job = {"JOB_ID": "7", "STEP_NODELIST": "node[3-4]", "NTASKS": "2", "PROCID": "1", "LOCALID": "0"}
    for name, value in {**job, "STEP_NUM_NODES": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    place = meeting.find_place(None, None, None)
    assert (place.host, place.processes, place.process) == ("node3", 2, 1)


def test_an_address_of_the_sixth_version_is_understood():
    assert meeting.find_place("[::1]:8476", 2, 1)[:2] == ("::1", 8476)


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
    found = arrays.from_first(tree)
    for name, leaf in tree.items():
        assert found[name].dtype == leaf.dtype
        assert found[name].shape == leaf.shape
        assert found[name].tobytes() == leaf.tobytes()


def test_one_process_has_all_clients_of_a_cohort():
    place = fr.layout(2)
    order = place.arrange(np.arange(11), np.arange(11))
    assert place.processes == 1
    assert place.mine(order) is order
    assert arrays.share(12) == slice(0, 12)
    assert arrays.spread(order) is order


def test_keys_and_arrays_are_copied_to_every_device():
    found = arrays.replicate({"key": jax.random.key(3), "number": 4, "row": np.arange(3)})
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


def test_devices_are_divided_evenly_among_processes(monkeypatch):
    monkeypatch.setattr(meeting, "_met", meeting.Met(meeting.Place("node1", 8476, 2, 0), 1, "127.0.0.1"))
    with pytest.raises(ValueError, match="devices is 3; 2 processes have equally many each"):
        fr.start_devices(3)
