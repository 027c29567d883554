// What the page computes is what Python computes, on vectors that tests/device_vectors.py writes.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { Bundle, readTensors, underPrefix } from "../../src-device/fedrecon_device/web/bundle.js";
import { clipped, find, fold, nearest, rank } from "../../src-device/fedrecon_device/web/ranking.js";
import { factorization, predictAll, reconstruct } from "../../src-device/fedrecon_device/web/solvers.js";
import { PersonalWords, Vocabulary, splitText, wordHash } from "../../src-device/fedrecon_device/web/words.js";

const vectors = JSON.parse(readFileSync(new URL("./vectors.json", import.meta.url), "utf8"));

/** @param {ArrayLike<number>} found @param {number[]} expected */
function close(found, expected, within = 1e-5) {
  assert.equal(found.length, expected.length);
  expected.forEach((value, k) => {
    assert.ok(Math.abs(found[k] - value) <= within * Math.max(1, Math.abs(value)), `${k}: ${found[k]} and ${value}`);
  });
}

test("text is split into the sentences and words of training", () => {
  for (const { text, sentences } of vectors.texts) assert.deepEqual(splitText(text), sentences, JSON.stringify(text));
});

test("words have the hash of training, of any length", () => {
  for (const { word, hash } of vectors.hashes) assert.equal(wordHash(word), hash, word);
});

test("sentences, prompts and a person's own words look as in training", () => {
  const { vocabulary, text, columns, own, prompt } = vectors.words;
  const words = new Vocabulary(vocabulary);
  const sentences = splitText(text);
  const found = words.columns(sentences);
  for (const name of ["word", "oov", "pair", "target"]) assert.deepEqual(Array.from(found[name]), columns[name], name);
  const asked = words.prompt(prompt.words);
  assert.equal(asked.words.length, prompt.place);
  for (const name of ["word", "oov", "pair"]) assert.deepEqual(Array.from(asked.columns[name]), prompt[name], name);
  const person = new PersonalWords(words);
  for (const sentence of sentences) person.learn(sentence);
  assert.deepEqual(Object.fromEntries([...person.own].map(([word, place]) => [word, person.uses[place]])), own);
});

test("suggestions are those of Python, in its order", () => {
  const { vocabulary, logits, text, suggested } = vectors.words;
  const person = new PersonalWords(new Vocabulary(vocabulary));
  for (const sentence of splitText(text)) person.learn(sentence);
  for (const { words, n, prefix, found: expected } of suggested) {
    const found = person.suggest(logits, words, n, prefix);
    assert.deepEqual(found.map(({ word, personal }) => [word, personal]), expected.map((s) => [s.word, s.personal]));
    close(found.map((one) => one.probability), expected.map((one) => one.probability));
  }
});

test("items are ranked with ties, exclusions and rare items as in Python", () => {
  for (const { scores, n, left_out: leftOut, counts, found } of vectors.ranking.ranked) {
    assert.deepEqual(rank(scores, n, { leftOut, counts, least: 2 }), found);
  }
  assert.deepEqual(rank([NaN, 1, Infinity, 2], 4), [3, 1]);
});

test("neighbours and clipped scores are those of Python", () => {
  const table = Float32Array.from(vectors.ranking.table);
  for (const { item, found } of vectors.ranking.nearest) {
    assert.deepEqual(nearest(table, 3, item, [0, 1, 2, 3, 4], 3), found);
  }
  for (const { score, clipped: within } of vectors.ranking.clipped) assert.equal(clipped(score, [0.5, 5]), within);
  assert.equal(clipped(7, null), 7);
});

test("both solvers and every optimizer give the local parameters and scores of JAX", () => {
  const tensors = (/** @type {Record<string, any>} */ all) =>
    new Map(Object.entries(all).map(([path, { data, shape }]) => [path, { data: Float32Array.from(data), shape }]));
  for (const one of vectors.solved) {
    const bundle = new Bundle({ reconstruct: one.settings, roles: one.roles }, async () => new ArrayBuffer(0));
    bundle.tables = tensors(one.tables);
    bundle.start = tensors(one.start);
    const model = factorization(bundle);
    const local = reconstruct(model, one.items, one.ratings);
    const expected = [...(one.local.user_bias ?? []), ...one.local.user_embedding, ...(one.local.popularity_weight ?? [])];
    close(local, expected);
    close(predictAll(model, local), one.scores);
  }
});

test("tables of every form are read as Python reads them", () => {
  for (const [kind, { file, table }] of Object.entries(vectors.tables)) {
    const bytes = Uint8Array.from(Buffer.from(file, "base64"));
    const tensors = readTensors(bytes.buffer);
    const found = underPrefix(tensors, "global/").get("table");
    assert.deepEqual(found.shape, [200, 6], kind);
    close(found.data.subarray(0, 20 * 6), table, 1e-6);
    assert.deepEqual(Array.from(underPrefix(tensors, "start/").get("own").data), [0, 1, 2]);
  }
});

test("titles are found by any of their words, whatever the accents, and the most rated come first", () => {
  const titles = ["Amélie", "The Matrix", "Matrix Reloaded, The", "Toy Story"].map(fold);
  assert.deepEqual(find(titles, "amelie", null, 5), [0]);
  assert.deepEqual(find(titles, "the matrix", [0, 5, 9, 1], 5), [1, 2]);
  assert.deepEqual(find(titles, "matrix", [0, 9, 1, 1], 5), [2, 1]);
  assert.deepEqual(find(titles, "nothing like it", null, 5), []);
  assert.deepEqual(find(["it happened", "heat", "it"], "It", [9, 1, 1], 5), [2, 0]);
});
