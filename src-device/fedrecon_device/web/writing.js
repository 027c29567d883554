// Text: suggestions while typing, with the words that only this person uses.
// @ts-check

import { loadGraphs } from "./onnx.js";
import * as store from "./store.js";
import { at, counted, element, say } from "./widgets.js";
import { Vocabulary, splitText } from "./words.js";

/** @typedef {import("./bundle.js").Bundle} Bundle */

const SUGGESTED = 5, PAUSE = 250;

/**
 * Show the page of a text model.
 * @param {Bundle} bundle
 * @param {{onChange: () => void}} page
 */
export async function showWriting(bundle, { onChange }) {
  const vocabulary = new Vocabulary(await bundle.json("words.json.zlib"));
  const [reconstruct, predict] = await loadGraphs(bundle, ["reconstruct", "predict"]);
  const most = bundle.manifest.examples.most;
  const width = vocabulary.maxWords;
  /** @type {Map<string, import("./onnx.js").Input>} */
  const tables = new Map([...bundle.tables].map(([path, table]) => [`global/${path}`, table]));
  let local = startOf(bundle);
  /** @type {string[][]} */
  let sentences = store.kept(isSentence);

  const text = /** @type {HTMLTextAreaElement} */ (at("text"));
  const chips = at("suggestions");
  const learn = /** @type {HTMLButtonElement} */ (at("learn"));
  const state = at("learned");

  const reconstructAll = async () => {
    const newest = sentences.slice(-most);
    const columns = vocabulary.columns(newest, most);
    const inputs = new Map(tables);
    for (const [path, leaf] of bundle.start) inputs.set(`start/${path}`, leaf);
    for (const [name, data] of Object.entries(columns)) inputs.set(`example/${name}`, { data, shape: [most, width] });
    inputs.set("count", { data: Int32Array.of(newest.length), shape: [] });
    const begun = performance.now();
    const found = await reconstruct.run(inputs);
    local = new Map([...found].map(([name, one]) => [name.replace("local/", ""), one]));
    const own = [...vocabulary.ownWords(sentences).values()].reduce((sum, words) => sum + words.size, 0);
    state.textContent = sentences.length
      ? `Reconstructed from ${counted(newest.length, "sentence")} of yours, with ${counted(own, "word")} of your own.`
      : "Nothing is known about you yet.";
    const took = performance.now() - begun;
    const flat = Object.fromEntries([...local].map(([path, one]) => [path, Array.from(one.data)]));
    Object.assign(globalThis, { fedrecon: { local: flat, took } }); // for tests
  };

  const suggest = async () => {
    const { columns, place } = vocabulary.prompt(text.value.split(/\n/).at(-1) ?? "");
    const inputs = new Map(tables);
    for (const [path, leaf] of local) inputs.set(`local/${path}`, leaf);
    for (const name of /** @type {const} */ (["word", "oov"])) {
      inputs.set(`example/${name}`, { data: columns[name], shape: [1, width] });
    }
    const found = (await predict.run(inputs)).get("prediction");
    if (found === undefined) return;
    const outputs = found.shape[2];
    const logits = found.data.subarray(place * outputs, (place + 1) * outputs);
    const words = vocabulary.suggest(logits, vocabulary.ownWords(sentences), SUGGESTED);
    chips.replaceChildren(...words.map((one) => chip(one)));
    Object.assign(/** @type {any} */ (globalThis).fedrecon ?? {}, { words });
  };

  /** @param {import("./words.js").Suggestion} one */
  const chip = ({ word, probability, personal }) => {
    const button = element("button", { class: personal ? "chip own" : "chip", type: "button", text: word });
    button.setAttribute("aria-label", `${word}, ${(100 * probability).toFixed(0)} percent${personal ? ", your word" : ""}`);
    button.addEventListener("click", () => {
      const gap = text.value === "" || /\s$/.test(text.value) ? "" : " ";
      text.value += `${gap}${word} `;
      text.focus();
      void suggest();
    });
    const line = element("li", {});
    line.append(button);
    return line;
  };

  let timer = 0;
  text.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => void suggest(), PAUSE);
  });
  learn.addEventListener("click", async () => {
    const written = splitText(text.value);
    if (written.length === 0) return say("Write something first.");
    learn.disabled = true;
    sentences = [...sentences, ...written];
    store.keep(sentences);
    text.value = ""; // so that nothing is learned twice
    await reconstructAll();
    await suggest();
    learn.disabled = false;
    text.focus();
    say(state.textContent ?? "");
    onChange();
  });
  const show = async () => {
    sentences = store.kept(isSentence);
    await reconstructAll();
    await suggest();
  };
  await show();
  at("writing").hidden = false;
  return { show, describe: () => counted(sentences.length, "sentence") };
}

/** @type {(example: any) => example is string[]} */
const isSentence = /** @type {any} */ (
  (/** @type {any} */ words) => Array.isArray(words) && words.every((word) => typeof word === "string")
);

/** @param {Bundle} bundle @returns {Map<string, {data: Float32Array, shape: number[]}>} */
function startOf(bundle) {
  return new Map(bundle.start);
}
