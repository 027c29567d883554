"""Bundles for devices against their budgets: sizes, export, import, reconstruction here and in Chromium.

    python benchmarks/device.py --data synthetic --json figures.json

Sizes are exact. Times depend on the machine. If Chromium or playwright is missing, its row says so.
"""

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import numpy as np

from fedrecon.app.cli.demo import SETTINGS
from fedrecon.app.config import Factorization, RatingsConfig, Reconstruct, Scale
from fedrecon.app.presets import DEFAULT
from fedrecon.app.saved import SavedModel
from fedrecon.app.tasks import RATINGS, Items
from fedrecon.device.saved import bundle_model
from fedrecon_device import Bundle

RATED = 100


def of_defaults(num_items):
    """A model of the default settings with numbers as large as trained ones, without titles."""
    scale = Scale(mean=3.5, deviation=1.0, low=0.5, high=5.0, standardized=True, trait_ridges=(20.0, 30.0))
    config = dataclasses.replace(DEFAULT, model=dataclasses.replace(DEFAULT.model, scale=scale))
    items = untrained(num_items, 1).legend
    draw = np.random.default_rng(0)
    shapes = jax.eval_shape(RATINGS.build_model(config, items).init_global, jax.random.key(0))
    params = jax.tree.map(lambda leaf: draw.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)
    return SavedModel(config, params, items)


def untrained(num_items, dim, *, titles=False, **reconstruct):
    """A model with numbers as large as trained ones."""
    draw = np.random.default_rng(0)
    config: RatingsConfig = dataclasses.replace(
        RATINGS.untrained,
        model=Factorization(dim=dim, biases=True, init_mean=3.5),
        reconstruct=Reconstruct(**reconstruct),
    )
    params = {
        "item_embedding": draw.normal(0, 0.3, (num_items, dim)).astype(np.float32),
        "item_bias": draw.normal(0, 0.3, num_items).astype(np.float32),
        "mean": np.float32(3.5),
    }
    names = np.array([f"A usual title ({k:06} AD)" for k in range(num_items)]) if titles else None  # 25 characters
    counts = np.minimum(draw.zipf(1.6, num_items), 400)
    return SavedModel(config, params, Items(np.arange(num_items), names, counts, (0.5, 5.0)))


def size_of(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def loaded_by_the_page(folder):
    return sum((folder / n).stat().st_size for n in ("manifest.json", "items.json", "global.safetensors")) + page_of(
        folder
    )


def page_of(folder):
    return sum(file.stat().st_size for file in (folder / "web").rglob("*") if file.is_file())


def titles_of(folder):
    """How many bytes of a bundle are titles."""
    items = json.loads((folder / "items.json").read_text())
    whole, without = (len(json.dumps(one, separators=(",", ":"))) for one in (items, {**items, "labels": None}))
    return whole - without


def timed(run, times=20):
    run()
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        run()
        found.append(time.perf_counter() - begun)
    return float(np.median(found))


def in_chromium(folder):
    """Rate 100 films in the page and return how long the last reconstruction with all scores took, in ms."""
    chromium = next(
        (p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None
    )
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if chromium is None:
        return None
    from fedrecon.device.page import serve

    server = serve(folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"http://localhost:{server.server_address[1]}/web/")
        kept = json.dumps({"version": 1, "examples": [[k, 1 + k % 5] for k in range(RATED)]})
        page.evaluate("(kept) => localStorage.setItem('fedrecon:/web/', kept)", kept)
        found = []
        for _ in range(5):
            page.reload()
            while not page.evaluate("document.documentElement.dataset.ready ?? ''"):
                time.sleep(0.05)
            found.append(page.evaluate("fedrecon.took"))
        browser.close()
    server.shutdown()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used: the models are made up")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = measured(Path(place))
    arguments.json.write_text(json.dumps(found))


def measured(place):
    settings = {"solver": SETTINGS.reconstruct.solver, "ridge": SETTINGS.reconstruct.ridge}
    begun = time.perf_counter()
    small = bundle_model(untrained(9066, 50, titles=True, **settings), place / "small", quantise="int8")
    export = time.perf_counter() - begun
    large = bundle_model(untrained(100_000, 50, **settings), place / "large", quantise="int8")
    usual = bundle_model(of_defaults(100_000), place / "usual", quantise="int8")
    per_title = titles_of(small) / 9066
    importing = timed(lambda: subprocess.run([sys.executable, "-c", "import fedrecon_device"], check=True), 5)
    starting = timed(lambda: subprocess.run([sys.executable, "-c", "import numpy"], check=True), 5)
    device = Bundle(small)
    ratings = {"item": np.arange(RATED), "rating": 1.0 + np.arange(RATED) % 5}
    here = timed(lambda: device.reconstruct(ratings))
    browser = in_chromium(small)
    figures = {
        "page_bytes": page_of(small),
        "loaded_bytes": loaded_by_the_page(small),
        "large_bytes": size_of(large),
        "default_bytes": size_of(usual),
        "bytes_a_title": per_title,
        "export_seconds": export,
        "import_seconds": importing,
        "numpy_seconds": starting,
        "onnxruntime_ms": 1000 * here,
        "chromium_ms": browser,
    }
    chromium = (
        "no Chromium or playwright" if browser is None else f"{browser[0]:.1f} ms, then {np.median(browser[1:]):.1f}"
    )
    rows = [
        ("the page without tables", f"{page_of(small) / 1e3:.0f} kB", "100 kB"),
        ("all that the page loads, 9,066 films x 50, int8", f"{loaded_by_the_page(small) / 1e6:.2f} MB", "2.5 MB"),
        ("a bundle of 100,000 items x 50 without titles, int8", f"{size_of(large) / 1e6:.2f} MB", "6 MB"),
        ("the same, default settings (16 dimensions)", f"{size_of(usual) / 1e6:.2f} MB", "6 MB"),
        ("titles of 25 characters, for 100,000 items", f"{per_title / 10:.2f} MB more", ""),
        ("fedrecon bundle, 9,066 films", f"{export:.0f} s", "60 s"),
        ("import fedrecon_device, in a new process", f"{importing:.2f} s (numpy alone {starting:.2f})", "0.3 s"),
        (f"least squares from {RATED} ratings, ONNX Runtime", f"{1000 * here:.1f} ms", ""),
        (f"least squares from {RATED} ratings and all scores, Chromium", chromium, "50 ms"),
    ]
    return {"rows": rows, "figures": figures}


if __name__ == "__main__":
    main()
