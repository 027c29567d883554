"""The page's own code in node, as a process that answers one question a line."""

import json
import subprocess
from pathlib import Path

WEB = Path(__file__).parent.parent / "src-device" / "fedrecon_device" / "web"
SCRIPT = """
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { Bundle } from "WEB/bundle.js";
import { clipped, rank } from "WEB/ranking.js";
import { factorization, predictAll, reconstruct } from "WEB/solvers.js";
const read = (name) => readFileSync(`${process.argv[2]}/${name}`);
const manifest = JSON.parse(read("manifest.json"));
const bundle = new Bundle(manifest, async (name) => new Uint8Array(read(name)).buffer);
await bundle.load();
const model = factorization(bundle);
const { counts } = await bundle.json("items.json.zlib");
for await (const line of createInterface({ input: process.stdin })) {
  const { item, rating } = JSON.parse(line);
  const newest = -manifest.examples.most;
  const local = reconstruct(model, item.slice(newest), rating.slice(newest));
  const scores = predictAll(model, local);
  const best = rank(scores, scores.length, { leftOut: item, counts, least: manifest.least_count });
  const shown = best.map((k) => clipped(scores[k], manifest.scale));
  console.log(JSON.stringify({ local: Array.from(local), scores: Array.from(scores), best, shown }));
}
"""


class Page:
    """The solvers and the ranking of the page, over a bundle."""

    def __init__(self, bundle, place):
        """Start node with a script in the folder `place`."""
        (place / "page.mjs").write_text(SCRIPT.replace("WEB", WEB.as_uri()))
        self._node = subprocess.Popen(
            ["node", str(place / "page.mjs"), str(bundle)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, item, rating):
        """Return what the page makes of ratings: `local`, `scores` of all items, `best` items, `shown` ratings."""
        question = {"item": [int(k) for k in item], "rating": [float(value) for value in rating]}
        self._node.stdin.write(json.dumps(question) + "\n")
        self._node.stdin.flush()
        return json.loads(self._node.stdout.readline())

    def close(self):
        """End the process."""
        self._node.stdin.close()
        self._node.wait(20)
        self._node.stdout.close()
