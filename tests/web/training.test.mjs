// What a device that trains draws, packs and seals is what Python does, on vectors that tests/device_vectors.py writes.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { clientKey, nameHash, redrawnOrder } from "../../src-device/fedrecon_device/web/keys.js";
import { readPlan } from "../../src-device/fedrecon_device/web/plan.js";
import { addNoise, expandMask, packVector, poisson, sealReport, systemUniform } from "../../src-device/fedrecon_device/web/sealing.js";
import { layOut, packExamples } from "../../src-device/fedrecon_device/web/training.js";

const vectors = JSON.parse(readFileSync(new URL("./vectors.json", import.meta.url), "utf8"));
const bytes = (/** @type {string} */ hex) => Uint8Array.from(Buffer.from(hex, "hex"));
const hex = (/** @type {Uint8Array} */ data) => Buffer.from(data).toString("hex");
const PKCS8 = "302e020100300506032b656e04220420"; // before the 32 bytes of a private X25519 key

/** @param {string} secret @param {string} shared */
const pairOf = async (secret, shared) => ({
  privateKey: await crypto.subtle.importKey("pkcs8", bytes(PKCS8 + secret), { name: "X25519" }, false, ["deriveBits"]),
  publicKey: await crypto.subtle.importKey("raw", bytes(shared), { name: "X25519" }, true, []),
});

test("keys and orders are those of JAX and of the packer, whatever the name", () => {
  for (const { round, name, hash, key, order } of vectors.keys) {
    assert.equal(nameHash(name).toString(16).padStart(16, "0"), hash);
    assert.deepEqual(clientKey(round, name), key, name);
    assert.deepEqual(redrawnOrder(round, name, order.length), order, name);
  }
  assert.equal(nameHash("a\0b"), nameHash("ab"));
});

/** @param {any} person @param {any} plan */
const columnsOf = (person, plan) =>
  Object.fromEntries(
    Object.entries(plan.examples.columns).map(([feature, { dtype }]) => {
      const flat = person[feature].flat(Infinity);
      return [feature, dtype === "float32" ? Float32Array.from(flat) : Int32Array.from(flat)];
    }),
  );

test("examples are split, padded and their rows numbered as a packer does", () => {
  for (const { plan, round, name, columns, inputs } of vectors.device_inputs) {
    const packed = packExamples(plan, columnsOf(columns, plan), round, name);
    assert.deepEqual([...packed.keys()].sort(), Object.keys(inputs).sort());
    for (const [input, { data }] of packed) assert.deepEqual(Array.from(data), [inputs[input]].flat(Infinity), input);
  }
});

test("ids that a table does not have are refused", () => {
  const { plan, round } = vectors.device_inputs[0];
  const person = columnsOf({ item: [1, 40], pair: [[0, 0], [0, 0]], rating: [1, 2], time: [0, 0] }, plan);
  assert.throws(() => packExamples(plan, person, round, "x"), /rows 0 to 39/);
});

test("more rows than the plan has room for are refused", () => {
  const { plan, round, name, columns } = vectors.device_inputs.at(-1);
  const rows = Object.fromEntries(Object.entries(plan.rows).map(([group, about]) => [group, { ...about, capacity: 1 }]));
  assert.throws(() => packExamples({ ...plan, rows }, columnsOf(columns, plan), round, name), /rows of .*; the plan has room for 1/);
});

test("rows of a table go to their places in the vector, other outputs follow each other", () => {
  const layout = [{ at: 0, values: "values", ids: "ids", count: "count" }, { at: 6, values: "rest" }];
  const outputs = new Map([
    ["values", { data: Uint32Array.of(1, 2, 3, 4, 9, 9), shape: [3, 2] }],
    ["ids", { data: Int32Array.of(2, 0, 0), shape: [3] }],
    ["count", { data: Int32Array.of(2), shape: [] }],
    ["rest", { data: Uint32Array.of(7), shape: [] }],
  ]);
  assert.deepEqual(Array.from(layOut({ vector: { length: 7, dtype: "uint32", layout } }, outputs)), [3, 4, 0, 0, 1, 2, 7]);
});

test("plans are read and refused as in Python, whatever is damaged in them", () => {
  const { values, cases } = vectors.plans;
  for (const { plan, verdicts } of cases) {
    assert.deepEqual(readPlan(JSON.stringify(plan)), plan);
    for (const [path, verdict] of verdicts) {
      [undefined, ...values].forEach((value, k) => {
        const damaged = structuredClone(plan), parents = path.slice(0, -1), last = path.at(-1);
        const parent = parents.reduce((/** @type {any} */ holder, /** @type {any} */ key) => holder[key], damaged);
        if (value !== undefined) parent[last] = value;
        else if (Array.isArray(parent)) parent.splice(last, 1);
        else delete parent[last];
        const about = `${path.join(".")}: ${JSON.stringify(value)}`;
        if (verdict[k] === "1") assert.doesNotThrow(() => readPlan(JSON.stringify(damaged)), about);
        else assert.throws(() => readPlan(JSON.stringify(damaged)), /plan\.json: `\S+` is damaged; expected /, about);
      });
    }
  }
});

test("a report has the same bytes as Python's, from the same secrets", async () => {
  for (const { bits, vector, helper, purpose, secrets, ephemeral_public: shared, mask, report } of vectors.sealed) {
    const seed = bytes(secrets.seed);
    assert.deepEqual(Array.from(await expandMask(seed, vector.length)), mask);
    const about = { ...purpose, plan: bytes(purpose.plan), batch: bytes(purpose.batch) };
    const drawn = { id: bytes(secrets.id), seed, pair: await pairOf(secrets.ephemeral, shared) };
    assert.equal(hex(await sealReport(Uint32Array.from(vector), bits, bytes(helper), about, drawn)), report);
    const other = await sealReport(Uint32Array.from(vector), bits, bytes(helper), about);
    assert.equal(other.length, report.length / 2);
    assert.notEqual(hex(other), report);
  }
});

test("integers are packed without gaps", () => {
  const vector = Uint32Array.of(0x12345678, 0xfffff, 1);
  assert.equal(hex(packVector(vector, 32)), "78563412ffff0f0001000000");
  assert.equal(hex(packVector(vector, 24)), "785634ffff0f010000");
  assert.equal(hex(packVector(vector, 20)), "7856f4ffff0100000000");
  assert.throws(() => packVector(vector, 16), /bits must be 32, 24 or 20/);
});

test("noise has the mean and variance that it should have, at small and large rates", () => {
  for (const rate of [0.3, 9, 40, 80_000]) {
    const draw = poisson(rate, systemUniform());
    const many = Array.from({ length: 40_000 }, draw);
    const mean = many.reduce((a, b) => a + b) / many.length;
    const variance = many.reduce((sum, x) => sum + (x - mean) ** 2, 0) / many.length;
    assert.ok(Math.abs(mean - rate) < 6 * Math.sqrt(rate / many.length), `mean ${mean} of rate ${rate}`);
    assert.ok(Math.abs(variance / rate - 1) < 0.1, `variance ${variance} of rate ${rate}`); // more than six deviations
  }
  const vector = new Uint32Array(20_000);
  addNoise(vector, 50);
  const values = Array.from(vector, (x) => x | 0); // negative integers wrap around
  assert.ok(Math.abs(values.reduce((a, b) => a + b) / values.length) < 0.4);
  assert.ok(Math.abs(values.reduce((a, b) => a + b * b, 0) / values.length / 50 - 1) < 0.1);
});
