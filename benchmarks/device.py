"""Bundles for devices against their budgets: sizes, export, import, reconstruction and rounds here and in JavaScript.

    python benchmarks/device.py --data synthetic --json figures.json

Sizes are exact. Times depend on the machine. If node, the packages of tests/web (make test-web), Chromium or playwright
are missing, their rows say so.
"""

import argparse
import dataclasses
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import numpy as np

from fedrecon._src.app.cli.demo import SETTINGS
from fedrecon._src.device.model_bundle import DeviceTraining, bundle_model
from fedrecon._src.recommend.config import (
    DEFAULT,
    ClicksConfig,
    Factorization,
    RatingsConfig,
    Reconstruct,
    Scale,
    Update,
)
from fedrecon._src.recommend.saved_models import SavedModel
from fedrecon._src.recommend.tasks import RATINGS, Items
from fedrecon._src.recommend.tasks.ratings import load_ratings
from fedrecon.data import unique_labels
from fedrecon.device import DevicePlan
from fedrecon.models import ranking_params
from fedrecon_device import Bundle
from fedrecon_device.bundle import ITEMS, TABLES
from fedrecon_device.files import MANIFEST
from next_word import WRITTEN, text_model, written_sentences

RATED, MANY = 100, 100_000
HERE = Path(__file__).parent
NO_CHROMIUM, NO_RUNTIME = "no Chromium or playwright", "no Chromium, playwright or packages of tests/web"
DIST = "tests/web/node_modules/onnxruntime-web/dist"
RUNTIME = Path(os.environ.get("FEDRECON_ONNXRUNTIME_WEB", HERE.parent / DIST)).absolute()


def of_defaults(num_items, titles):
    """A model of the default settings with numbers as large as trained ones."""
    scale = Scale(mean=3.5, deviation=1.0, low=0.5, high=5.0, standardized=True, trait_ridges=(20.0, 30.0))
    config = dataclasses.replace(DEFAULT, model=dataclasses.replace(DEFAULT.model, scale=scale))
    items = untrained(num_items, 1, titles=titles).legend
    draw = np.random.default_rng(0)
    shapes = jax.eval_shape(RATINGS.build_model(config, items).init_global, jax.random.key(0))
    params = jax.tree.map(lambda leaf: draw.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)
    return SavedModel(config, params, items)


def of_the_paper(num_items, titles):
    """The paper's model: embeddings alone, SGD in reconstruction and update."""
    saved = untrained(num_items, 50, titles=titles)
    descent = {"learning_rate": 0.1, "batch_size": 5, "steps": 50}
    config = dataclasses.replace(
        saved.config,
        model=Factorization(dim=50),
        reconstruct=Reconstruct(solver="gradient-descent", **descent),
        update=Update(**descent),
    )
    params = {"item_embedding": saved.params["item_embedding"]}
    return SavedModel(config, params, saved.legend)


def of_clicks(num_items, titles):
    """A model of clicks of the default settings."""
    items = untrained(num_items, 1, titles=titles).legend
    table = np.random.default_rng(0).normal(0, 0.1, (num_items, 64)).astype(np.float32)
    return SavedModel(ClicksConfig(), ranking_params(table), items)


def made_up_titles(num_items):
    """Titles as long as those of films, of their words in any order: they compress somewhat worse than real ones."""
    films = RATINGS.legend(SETTINGS, load_ratings(SETTINGS.data)).titles
    words = np.array([word for title in films for word in title.split()])
    draw = np.random.default_rng(0)
    lengths = draw.choice([len(title.split()) for title in films], num_items)
    return np.array(unique_labels([" ".join(draw.choice(words, n)) for n in lengths], np.arange(num_items).tolist()))


def untrained(num_items, dim, *, titles=None, **reconstruct):
    """A model with numbers as large as trained ones."""
    draw = np.random.default_rng(0)
    config: RatingsConfig = dataclasses.replace(
        RatingsConfig(),
        model=Factorization(dim=dim, biases=True, init_mean=3.5),
        reconstruct=Reconstruct(**reconstruct),
    )
    params = {
        "item_embedding": draw.normal(0, 0.3, (num_items, dim)).astype(np.float32),
        "item_bias": draw.normal(0, 0.3, num_items).astype(np.float32),
        "mean": np.float32(3.5),
    }
    counts = np.minimum(draw.zipf(1.6, num_items), 400)
    ids = np.cumsum(draw.integers(1, 20, num_items))  # with gaps, as in MovieLens
    return SavedModel(config, params, Items(ids, None if titles is None else titles[:num_items], counts, (0.5, 5.0)))


def size_of(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def loaded_by_the_page(folder):
    return sum((folder / name).stat().st_size for name in (MANIFEST, ITEMS, TABLES)) + page_of(folder)


def page_of(folder):
    return sum(file.stat().st_size for file in (folder / "web").rglob("*") if file.is_file())


def timed(run, times=20):
    run()
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        run()
        found.append(time.perf_counter() - begun)
    return float(np.median(found))


def in_chromium(folder, measure):
    """Serve a bundle to a tab of Chromium and return what `measure(tab)` does; None without Chromium or playwright."""
    chromium = next(
        (p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None
    )
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if chromium is None:
        return None
    from fedrecon._src.device.web_page import serve

    server = serve(folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        found = measure(browser.new_page(base_url=f"http://localhost:{server.server_address[1]}"))
        browser.close()
    server.shutdown()
    return found


def time_reconstruction(page, examples):
    """Return how long the page took to reconstruct a person with these examples, in ms, each time it was opened."""
    kept = json.dumps({"version": 1, "examples": examples})
    page.goto("/web/")
    page.evaluate("(kept) => localStorage.setItem('fedrecon:/web/', kept)", kept)
    found = []
    for _ in range(5):
        page.reload()
        wait_for(page)
        found.append(page.evaluate("fedrecon.took"))
    return found


def wait_for(page):
    while not page.evaluate("document.documentElement.dataset.ready ?? ''"):
        time.sleep(0.05)


def time_rounds(page):
    """Return what a round of training takes on the page, and the most memory of the process that runs it."""
    script = HERE / "device_round.mjs"
    page.add_init_script("delete Navigator.prototype.serviceWorker")  # it knows only the bundle's own files
    page.route("**/device_round.mjs", lambda route: route.fulfill(path=script, content_type="text/javascript"))
    page.goto("/web/")
    wait_for(page)
    figures = page.evaluate(
        """async (rated) => {
          const { timeRounds } = await import(`${location.origin}/web/device_round.mjs`);
          const { fetchFrom } = await import(`${location.origin}/web/bundle.js`);
          return timeRounds({ folder: location.origin, read: fetchFrom(new URL("..", location.href)), rated });
        }""",
        RATED,
    )
    processes = page.context.browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
    peaks = [peak_memory(process["id"]) for process in processes if process["type"] == "renderer"]
    return figures | {"MB": max(peaks)}


def peak_memory(process):
    """Return the most memory that a process had, in MB."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1e3


def in_node(folder):
    """Return what a round of training takes in node; None without node or onnxruntime-web."""
    if shutil.which("node") is None or not RUNTIME.is_dir():
        return None
    command = ["node", str(HERE / "device_round.mjs"), str(folder), str(RUNTIME), str(RATED)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


TRAIN_ON = """
import json, sys, time
import numpy as np
from fedrecon_device import Bundle, Trainer
from fedrecon_device.sealing import Purpose, make_report

folder, rated = sys.argv[1], int(sys.argv[2])
begun = time.perf_counter()
bundle = Bundle(folder)
trainer = Trainer(bundle)
loaded = time.perf_counter() - begun
message = {f"message/method/{path}": table for path, table in bundle.tables.items()}
columns = {"item": np.arange(rated), "rating": 1.0 + np.arange(rated) % 5}
plan, total = bytes.fromhex(trainer.digest), trainer.plan["sum"]
times = []
for number in range(21):
    begun = time.perf_counter()
    vector = trainer.update(message, (0, number), "device", columns).vector
    purpose = Purpose(plan, "benchmark ", bytes(16), number, len(vector))
    report = make_report(vector, bytes.fromhex(total["helper"]), purpose, total["bits"])
    times.append(time.perf_counter() - begun)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # of this program alone
figures = {"load_ms": 1e3 * loaded, "first_ms": 1e3 * times[0], "ms": 1e3 * float(np.median(times[1:]))}
assert "jax" not in sys.modules
print(json.dumps({**figures, "MB": int(peak.split()[1]) / 1e3, "report_bytes": len(report)}))
"""


def training_of(model, folder):
    """Bundle a model for training; return sizes, and what a round takes in Python without JAX, node and Chromium."""
    begun = time.perf_counter()
    runtime = RUNTIME if RUNTIME.is_dir() else None
    bundle_model(model, folder, onnxruntime_web=runtime, train=DeviceTraining(DevicePlan(helper="ab" * 32)))
    export = time.perf_counter() - begun
    plan, graph = json.loads((folder / "plan.json").read_text()), (folder / "update.onnx").read_bytes()
    down = sum(
        4 * int(np.prod(about["shape"])) for name, about in plan["inputs"].items() if name.startswith("message/")
    )
    run = subprocess.run(
        [sys.executable, "-c", TRAIN_ON, str(folder), str(RATED)], check=True, capture_output=True, text=True
    )
    return json.loads(run.stdout) | {
        "export_seconds": export,
        "graph_bytes": len(graph),
        "graph_gzip_bytes": len(gzip.compress(graph, 9, mtime=0)),
        "down_bytes": down,
        "up_bytes": plan["vector"]["length"] * plan["sum"]["bits"] // 8 + 96,
        "node": in_node(folder),
        "chromium": None if runtime is None else in_chromium(folder, time_rounds),
    }


def training_rows(what, figures):
    """Write the rows on a round of training."""
    sizes = f"{figures['graph_gzip_bytes'] / 1e3:.0f} kB of graph (gzip), {figures['down_bytes'] / 1e6:.2f} MB down"
    title = f"a round on {RATED} ratings, {what}"
    return [
        (title, f"{round_times(figures)}; {sizes}, {figures['up_bytes'] / 1e6:.2f} MB up", ""),
        (f"{title}, node.js", round_times(figures["node"]) or "no node or packages of tests/web", ""),
        (f"{title}, Chromium", round_times(figures["chromium"]) or NO_RUNTIME, ""),
    ]


def round_times(figures):
    if figures is None:
        return None
    return f"{figures['first_ms']:.0f} ms, then {figures['ms']:.1f}; {figures['MB']:.0f} MB of memory"


def page_times(times, missing):
    return missing if times is None else f"{times[0]:.1f} ms, then {np.median(times[1:]):.1f}"


def of_words(folder):
    """Return how long the page takes to learn a person's sentences with the default model of text, in ms."""
    if not RUNTIME.is_dir():
        return None
    saved = text_model()
    bundle_model(saved, folder, onnxruntime_web=RUNTIME)
    return in_chromium(folder, lambda page: time_reconstruction(page, written_sentences(saved.legend)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used: the models are made up")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = measured(Path(place))
    arguments.json.write_text(json.dumps(found))


def measured(place):
    titles = made_up_titles(MANY)
    settings = {"solver": SETTINGS.reconstruct.solver, "ridge": SETTINGS.reconstruct.ridge}
    begun = time.perf_counter()
    small = bundle_model(untrained(9066, 50, titles=titles, **settings), place / "small", quantise="int8")
    export = time.perf_counter() - begun
    large = {
        "50 dimensions, without titles": untrained(MANY, 50, **settings),
        "50 dimensions, with titles": untrained(MANY, 50, titles=titles, **settings),
        "default settings (16 dimensions, implicit feedback, traits), with titles": of_defaults(MANY, titles),
        "clicks, default settings (64 dimensions), with titles": of_clicks(MANY, titles),
    }
    sizes = {what: size_of(bundle_model(model, place / what, quantise="int8")) for what, model in large.items()}
    importing = timed(lambda: subprocess.run([sys.executable, "-c", "import fedrecon_device"], check=True), 5)
    starting = timed(lambda: subprocess.run([sys.executable, "-c", "import numpy"], check=True), 5)
    device = Bundle(small)
    ratings = {"item": np.arange(RATED), "rating": 1.0 + np.arange(RATED) % 5}
    here = timed(lambda: device.reconstruct(ratings))
    examples = [[device.items.ids[k], 1 + k % 5] for k in range(RATED)]
    browser = in_chromium(small, lambda page: time_reconstruction(page, examples))
    words = of_words(place / "words")
    models = {
        "default settings, 9,066 films x 16": of_defaults(9066, titles),
        "the paper's factorization, 9,066 films x 50": of_the_paper(9066, titles),
    }
    training = {what: training_of(model, place / f"train {what}") for what, model in models.items()}
    figures = {
        "training": training,
        "page_bytes": page_of(small),
        "loaded_bytes": loaded_by_the_page(small),
        "large_bytes": sizes,
        "characters_a_title": float(np.mean([len(title) for title in titles])),
        "export_seconds": export,
        "import_seconds": importing,
        "numpy_seconds": starting,
        "onnxruntime_ms": 1000 * here,
        "chromium_ms": browser,
        "words_chromium_ms": words,
    }
    rows = [
        ("the page without tables", f"{page_of(small) / 1e3:.0f} kB", "100 kB"),
        ("all that the page loads, 9,066 films x 50, int8", f"{loaded_by_the_page(small) / 1e6:.2f} MB", "2.5 MB"),
        *(
            (f"a bundle of {MANY:,} items, int8: {what}", f"{size / 1e6:.2f} MB", "6 MB")
            for what, size in sizes.items()
        ),
        ("fedrecon bundle, 9,066 films", f"{export:.0f} s", "60 s"),
        ("import fedrecon_device, in a new process", f"{importing:.2f} s (numpy alone {starting:.2f})", "0.3 s"),
        (f"least squares from {RATED} ratings, ONNX Runtime", f"{1000 * here:.1f} ms", ""),
        (f"least squares from {RATED} ratings and all scores, Chromium", page_times(browser, NO_CHROMIUM), "50 ms"),
        (
            f"a person with {WRITTEN} sentences, default model of text, Chromium",
            page_times(words, NO_RUNTIME),
            "200 ms",
        ),
        *(row for what, found in training.items() for row in training_rows(what, found)),
    ]
    return {"rows": rows, "figures": figures}


if __name__ == "__main__":
    main()
