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
let different = 0, worst = 0, worstState = 0;
const times = [];

/** How far numbers are from those that were promised, one by one; relative to large ones, but for integers. */
const differences = (/** @type {any} */ found, { at, values }, integers = false) =>
  values.map((/** @type {number} */ value, /** @type {number} */ k) => {
    const number = found[at?.[k] ?? k];
    return integers ? Math.abs((number | 0) - value) : Math.abs(number - value) / Math.max(1, Math.abs(value));
  });

for (const { name, examples, rounds } of cases) {
  const columns = Object.fromEntries(
    Object.entries(plan.examples.columns).map(([feature, { dtype }]) => {
      const flat = examples[feature].flat(Infinity);
      return [feature, dtype === "float32" ? Float32Array.from(flat) : Int32Array.from(flat)];
    }),
  );
  let state = null;
  for (const { key, vector: expected, state: kept } of rounds) {
    const begun = performance.now();
    const update = await trainer.update(columns, message, key, name, state);
    times.push(performance.now() - begun);
    const apart = differences(update.vector, expected, plan.vector.dtype === "uint32");
    different += apart.filter((difference) => difference > 0).length;
    worst = Math.max(worst, ...apart);
    state = update.state;
    for (const [path, leaf] of Object.entries(kept)) worstState = Math.max(worstState, ...differences(state.get(path).data, leaf));
  }
}
const rounds = times.length;
console.log(JSON.stringify({ cases: cases.length, rounds, length: plan.vector.length, different, worst, worstState, first_ms: times[0], least_ms: Math.min(...times) }));
process.exit(0); // onnxruntime-web keeps node alive
