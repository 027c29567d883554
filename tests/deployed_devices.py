"""A coordinator and a helper on loopback for devices of any kind, and the simulation of the same training."""

import contextlib
import importlib.util
import json
import os
import subprocess
import threading
from functools import partial
from pathlib import Path

import jax
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

import fedrecon as fr
from deployed import deployed
from device_models import default_model
from fedrecon._src.algorithms.algorithm import with_params
from fedrecon._src.core.pytrees import flatten
from fedrecon._src.deploy.admission import Verifier, public_bytes
from fedrecon._src.deploy.device_rounds import Start, serve_devices
from fedrecon._src.deploy.devices import DeviceApi
from fedrecon._src.deploy.helper_server import HelperApi
from fedrecon._src.deploy.http_client import Connection
from fedrecon._src.deploy.http_server import run_service
from fedrecon._src.deploy.node import Memory
from fedrecon._src.device.model_bundle import _ratings_parts
from fedrecon._src.device.web_page import page_files
from fedrecon._src.privacy.secure_sum.two_servers import Helper, read_served_plan
from fedrecon._src.recommend.rating_model import constant_parameters
from fedrecon._src.recommend.tasks import build_algorithm
from fedrecon.deploy import InProcess, Node, Pace, issue_token, plan_for

ROOT = Path(__file__).parent.parent
WEB, SCRIPTS = ROOT / "tests" / "web", ROOT / "src-device" / "fedrecon_device" / "web"
RUNTIME = WEB / "node_modules" / "onnxruntime-web" / "dist"
SECRET, HELPER, COORDINATOR = bytes(range(32)), X25519PrivateKey.generate(), Ed25519PrivateKey.generate()
LEAST, ROUNDS, SEED, MOST = 3, 2, 5, 50


TWO_SERVERS = {"max_weight": 100.0, "protocol": "two-servers", "bits": 24}


def make_bundle(folder, aggregate=None, fresh=False):
    """Write a bundle of the default recipe that trains, with its page; return it and what training starts with.

    Args:
      folder: to write.
      aggregate: how uploads are added up; by default through two servers.
      fresh: whether parameters are those with which the algorithm begins, not of a model as if trained.
    """
    saved = default_model(low=0.5, high=5.0)
    aggregate = aggregate or fr.aggregators.secure(5.0, clients=100, **TWO_SERVERS)
    algorithm = build_algorithm(saved.config, saved.algorithm.model, ROUNDS, aggregate)
    params = algorithm.params(algorithm.init(fr.kit.run_keys(SEED).init)) if fresh else saved.params
    params = jax.tree.map(np.asarray, params)
    legend, like = _ratings_parts(saved, MOST, None)
    helper = None if aggregate.ring is None else HELPER.public_key().public_bytes_raw().hex()
    limits = {"reports_per_day": 50, "constant": constant_parameters(saved.config.model)}
    bundle = fr.device.bundle(
        algorithm,
        params,
        folder,
        like=like,
        most=MOST,
        legend=legend._replace(page=partial(page_files, vendor=RUNTIME)),
        train=fr.device.DevicePlan(rounds=ROUNDS, least=LEAST, helper=helper, **limits),
    )
    return bundle, Start(algorithm, params, lambda folder, params: None)


@contextlib.contextmanager
def helping(bundle, folder):
    """Run a helper, and yield the coordinator's connection to it."""
    folder.mkdir(parents=True)
    helper, verifier = Helper(read_served_plan(bundle), HELPER, folder), {public_bytes(COORDINATOR): "coordinator"}
    with (
        run_service(HelperApi(helper, Verifier(verifier)), ("127.0.0.1", 0), None) as port,
        contextlib.closing(Connection(f"http://127.0.0.1:{port}", COORDINATOR, None)) as connection,
    ):
        yield connection


@contextlib.contextmanager
def coordinating(bundle, start, folder, reports=LEAST):
    """Train over devices; yields the coordinator's address and a list that gets its result, or what it raised."""
    plan, results = read_served_plan(bundle), []
    api = DeviceApi(plan, SECRET, retry=0.2)
    pace = Pace(reports, deadline=180, patience=180)

    def train(connection):
        try:
            results.append(serve_devices(api, start, fr.RunFolder(folder / "run"), connection, pace, seed=SEED))
        except Exception as error:
            results.append(error)

    with contextlib.ExitStack() as stack:
        connection = None if plan.protocol == "open" else stack.enter_context(helping(bundle, folder / "helper"))
        port = stack.enter_context(run_service(api, ("127.0.0.1", 0), None))
        thread = threading.Thread(target=train, args=[connection])
        thread.start()
        stack.callback(thread.join, 200)
        yield f"http://127.0.0.1:{port}/", results


def ratings_of(number, items=400):
    """Return made-up ratings of one person."""
    draw = np.random.default_rng(number)
    size = 4 + 3 * number
    return {
        "item": draw.permutation(items)[:size].astype(np.int32),
        "rating": draw.integers(1, 6, size) * np.float32(1),
    }


def clients_of(people):
    """Return people as clients of the simulator."""
    first = next(iter(people.values()))
    columns = {name: np.concatenate([person[name] for person in people.values()]) for name in first}
    owners = np.repeat(list(people), [len(person[next(iter(first))]) for person in people.values()])
    return fr.Clients.from_columns(columns, client=owners)


def train_on_silos(algorithm, people, folder):
    """Return the parameters after the rounds of a plan whose nodes have one or two of the people each."""
    everybody = clients_of(people)
    plan = plan_for(algorithm, everybody, rounds=ROUNDS, fractions=(1.0, 0.0, 0.0), max_examples=MOST, seed=SEED)
    nodes = {}
    for number, silo in enumerate((everybody.take(np.arange(1)), everybody.take(np.arange(1, len(people))))):
        read = partial(lambda silo, plan: plan.split_clients(silo), silo)
        nodes[number] = Node(read, lambda plan: True, algorithm=algorithm, memory=Memory(None)).handle
    return deployed(plan, InProcess(nodes), folder).params


def simulate(bundle, start, people, states=None):
    """Return the parameters after the rounds of a plan in which everybody takes part, by the simulator.

    What clients keep goes to `states`, by name and path.
    """
    examples = json.loads((bundle / "plan.json").read_text())["examples"]
    lengths, algorithm = fr.kit.Lengths(examples["support"], examples["query"]), start.algorithm
    state = with_params(algorithm.init(fr.kit.run_keys(SEED).init), start.params)
    clients, kept = clients_of(people), None
    if algorithm.method.init_client is not None:
        keys = fr.kit.client_keys(jax.random.key(0), clients.identities())  # the seed of a bundle
        kept = algorithm.method.init_client(start.params, keys)
    for number in range(read_served_plan(bundle).rounds):
        key = fr.kit.round_key(SEED, number)
        total, kept = fr.kit.client_total(algorithm, algorithm.message(state), clients, key, kept, lengths=lengths)
        state = fr.kit.server_update(algorithm, state, [total], key)
    if states is not None:
        leaves = flatten(kept)[0]
        states |= {name: {path: leaf[k] for path, leaf in leaves.items()} for k, name in enumerate(clients.names)}
    return algorithm.params(state)


def assert_equal(params, expected, tolerance=0.0):
    """Compare parameters, to the bit by default."""
    for leaf, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(other), rtol=0, atol=tolerance)


def record_of(name):
    """Return what a device of a given name keeps before its first round."""
    return {"name": name, "reports": [], "plan": None, "state": {}}


def run_node(bundle, server, people, folder, authority=None):
    """Run devices in a process of node until the coordinator refuses or ends them; returns the process."""
    devices = []
    for name, columns in people.items():
        store = folder / f"{name}.json"
        store.write_text(json.dumps(record_of(name)))
        lists = {feature: column.tolist() for feature, column in columns.items()}
        token, rounds = issue_token(SECRET, name), read_served_plan(bundle).rounds
        device = {"store": str(store), "token": token, "columns": lists, "rounds": rounds}
        devices.append(device)
    settings = {"bundle": str(bundle), "scripts": str(SCRIPTS), "runtime": str(RUNTIME), "server": server}
    environment = os.environ | ({"NODE_EXTRA_CA_CERTS": str(authority)} if authority else {})
    return subprocess.run(
        ["node", str(ROOT / "examples" / "devices" / "devices.mjs")],
        input=json.dumps(settings | {"devices": devices}),
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )


def page_server():
    """Return the module of the demo that puts a page and its coordinator under one address."""
    spec = importlib.util.spec_from_file_location("page_server", ROOT / "examples" / "devices" / "page_server.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
