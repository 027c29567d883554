// Run the training vectors of a bundle with onnxruntime-web in node: node tests/web/training_vectors.mjs FOLDER
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import * as ort from "onnxruntime-web";

import { openManifest } from "../../src-device/fedrecon_device/web/bundle.js";
import { readPlan } from "../../src-device/fedrecon_device/web/plan.js";
import { Trainer } from "../../src-device/fedrecon_device/web/training.js";

ort.env.logLevel = "error";
const read = async (/** @type {string} */ name) => {
  const data = await readFile(join(process.argv[2], name));
  return data.buffer.slice(data.byteOffset, data.byteOffset + data.byteLength);
};
const bundle = await openManifest(read);
await bundle.load();
const plan = readPlan(new TextDecoder().decode(await bundle.read("plan.json")));
const trainer = await Trainer.open(bundle, plan, ort);
const { message: sent, cases } = await bundle.json("training_vectors.json");
const message = new Map(
  Object.entries(sent).map(([name, { table, values, shape }]) => [
    name.replace("message/", ""),
    table === undefined ? { data: Float32Array.from(values), shape } : bundle.tables.get(table),
  ]),
);
let different = 0, worst = 0;
const times = [];
for (const { name, round_key: key, examples, vector: expected } of cases) {
  const columns = Object.fromEntries(
    Object.entries(plan.examples.columns).map(([feature, { dtype }]) => {
      const flat = examples[feature].flat(Infinity);
      return [feature, dtype === "float32" ? Float32Array.from(flat) : Int32Array.from(flat)];
    }),
  );
  const begun = performance.now();
  const { vector } = await trainer.update(columns, message, key, name);
  times.push(performance.now() - begun);
  const places = expected.at ?? expected.values.map((_, k) => k);
  expected.values.forEach((value, k) => {
    const found = plan.vector.dtype === "uint32" ? vector[places[k]] | 0 : vector[places[k]];
    const difference = Math.abs(found - value) / (plan.vector.dtype === "uint32" ? 1 : Math.max(1, Math.abs(value)));
    different += Number(difference > 0);
    worst = Math.max(worst, difference);
  });
}
console.log(JSON.stringify({ cases: cases.length, length: plan.vector.length, different, worst, first_ms: times[0], least_ms: Math.min(...times) }));
process.exit(0); // onnxruntime-web keeps node alive
