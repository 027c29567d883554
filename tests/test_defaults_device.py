"""Models of the default settings on devices: bundles and the page reconstruct and predict as Python does."""

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from fedrecon.app.config import Scale
from fedrecon.app.presets import DEFAULT
from fedrecon.app.saved import SavedModel
from fedrecon.app.tasks import RATINGS, Items
from fedrecon.device.saved import bundle_model

WEB = Path(__file__).parent.parent / "src" / "fedrecon" / "device" / "web"
SCRIPT = """
import { readFileSync } from "node:fs";
import { Bundle } from "WEB/bundle.js";
import { factorization, predictAll, reconstruct } from "WEB/solvers.js";
const read = (name) => readFileSync(`${process.argv[2]}/${name}`);
const bundle = new Bundle(JSON.parse(read("manifest.json")), async (name) => new Uint8Array(read(name)).buffer);
await bundle.load();
const model = factorization(bundle);
const found = JSON.parse(read("test_vectors.json")).map(({ examples }) => {
  const newest = -bundle.manifest.examples.most;
  const local = reconstruct(model, examples.item.slice(newest), examples.rating.slice(newest));
  return { local: Array.from(local), scores: Array.from(predictAll(model, local)) };
});
console.log(JSON.stringify(found));
"""


def saved_model(transform="none"):
    """Return a model of the default settings, with parameters as large as trained ones."""
    scale = Scale(
        transform=transform,
        mean=3.2,
        deviation=0.8,
        low=1.0,
        high=4.1,
        standardized=True,
        noise=0.6,
        user_ridge=3.0,
        trait_ridges=(20.0, 35.0),
    )
    config = dataclasses.replace(DEFAULT, model=dataclasses.replace(DEFAULT.model, dim=3, scale=scale))
    items = Items(np.arange(30), None, np.full(30, 9), (1.0, 5.0))
    draw = np.random.default_rng(0)
    shapes = jax.eval_shape(RATINGS.build_model(config, items).init_global, jax.random.key(0))
    params = jax.tree.map(lambda leaf: draw.normal(0, 0.4, leaf.shape).astype(np.float32), shapes)
    return SavedModel(config, params, items)


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node on this machine")
def test_the_page_computes_what_python_does(tmp_path):
    bundle_model(saved_model(), tmp_path / "bundle", most=12, onnx=False)
    (tmp_path / "run.mjs").write_text(SCRIPT.replace("WEB", WEB.as_uri()))
    command = ["node", str(tmp_path / "run.mjs"), str(tmp_path / "bundle")]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    vectors = json.loads((tmp_path / "bundle" / "test_vectors.json").read_text())
    assert len(found) == len(vectors)
    for mine, case in zip(found, vectors, strict=True):
        parts = [np.ravel(case["local"][name]["values"]) for name in ("user_bias", "user_embedding", "user_traits")]
        np.testing.assert_allclose(mine["local"], np.concatenate(parts), atol=1e-4)
        asked = case["predict"]["examples"]["item"]
        expected = np.ravel(case["predict"]["prediction"]["values"])
        np.testing.assert_allclose(np.array(mine["scores"])[asked], expected, atol=1e-4)
        assert 1.0 <= min(mine["scores"]) <= max(mine["scores"]) <= 4.1 + 1e-6


def test_graphs_for_onnx_do_what_the_model_does(tmp_path):
    """Bundling runs the test vectors in ONNX Runtime, and fails if they do not come out."""
    bundle_model(saved_model(), tmp_path / "bundle", most=12)
    assert (tmp_path / "bundle" / "reconstruct.onnx").exists()


def test_counts_are_not_for_devices(tmp_path):
    with pytest.raises(ValueError, match=r"--data\.transform none"):
        bundle_model(saved_model("log1p"), tmp_path / "bundle", onnx=False)
