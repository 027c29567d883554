// Text: suggestions while typing, with the words that only this person uses.
// @ts-check

import { loadGraphs } from "./onnx.js";
import * as store from "./store.js";
import { at, counted, element } from "./widgets.js";
import { PersonalWords, Vocabulary, splitText } from "./words.js";

/** @typedef {import("./bundle.js").Bundle} Bundle */

const SUGGESTED = 5, PAUSE = 150;
const PASTED = /^insertFrom(Paste|Drop|Yank)/;

/**
 * Show the page of a text model. Every sentence is learned when it ends, and pasted text at once.
 * @param {Bundle} bundle
 * @param {{onChange: () => void}} page
 */
export async function showWriting(bundle, { onChange }) {
  const vocabulary = new Vocabulary(await bundle.json("words.json.zlib"));
  const [reconstruct, predict] = await loadGraphs(bundle, ["reconstruct", "predict"]);
  const most = bundle.manifest.examples.most;
  const width = vocabulary.maxWords;
  const adds = bundle.manifest.reconstruct?.solver === "closed-form"; // local parameters of new sentences are added
  /** @type {Map<string, import("./onnx.js").Input>} */
  const tables = new Map([...bundle.tables].map(([path, table]) => [`global/${path}`, table]));
  let local = new Map(bundle.start);
  let person = new PersonalWords(vocabulary);
  /** @type {string[][]} */
  let sentences = [];
  /** @type {string[]} sentences of the text on the page that are learned already */
  let done = [];
  let unfinished = "";

  const text = /** @type {HTMLTextAreaElement} */ (at("text"));
  const chips = at("suggestions");
  const state = at("learned");

  /** @param {string[][]} some @returns {Promise<Map<string, {data: Float32Array, shape: number[]}>>} */
  const reconstructed = async (some) => {
    const newest = some.slice(-most);
    const columns = vocabulary.columns(newest, most);
    const inputs = new Map(tables);
    for (const [path, leaf] of bundle.start) inputs.set(`start/${path}`, leaf);
    for (const [name, data] of Object.entries(columns)) inputs.set(`example/${name}`, { data, shape: [most, width] });
    inputs.set("count", { data: Int32Array.of(newest.length), shape: [] });
    const found = await reconstruct.run(inputs);
    return new Map([...found].map(([name, one]) => [name.replace("local/", ""), one]));
  };

  /** @param {string[][]} written sentences that are new */
  const learn = async (written) => {
    const begun = performance.now();
    for (const sentence of written) person.learn(sentence);
    sentences = [...sentences, ...written];
    const found = await reconstructed(adds ? written : sentences);
    if (adds) {
      for (const [path, { data }] of found) {
        const start = bundle.start.get(path)?.data ?? [], old = local.get(path)?.data ?? [];
        data.forEach((value, k) => (data[k] = value + old[k] - start[k]));
      }
    }
    local = found;
    const took = performance.now() - begun;
    state.textContent = sentences.length
      ? `Learned from ${counted(sentences.length, "sentence")} of yours, with ${counted(person.own.size, "word")} of your own.`
      : "Nothing is known about you yet.";
    const flat = Object.fromEntries([...local].map(([path, one]) => [path, Array.from(one.data)]));
    Object.assign(globalThis, { fedrecon: { local: flat, took } }); // for tests
  };

  /** Return the words of the sentence that is being written, and the letters of one that is not complete. */
  const current = () => {
    const line = text.value.split(/\n/).at(-1) ?? "";
    const words = endsSentence(line) ? [] : (splitText(line).at(-1) ?? []);
    const last = words.at(-1) ?? "";
    const partial = last !== "" && !/\s$/.test(line) && !vocabulary.ids.has(last) && !person.own.has(last);
    return partial ? { words: words.slice(0, -1), letters: last } : { words, letters: "" };
  };

  const suggest = async () => {
    const { words, letters } = current();
    const prompt = vocabulary.prompt(words);
    const inputs = new Map(tables);
    for (const [path, leaf] of local) inputs.set(`local/${path}`, leaf);
    for (const name of /** @type {const} */ (["word", "oov", "pair"])) {
      inputs.set(`example/${name}`, { data: prompt.columns[name], shape: [1, width] });
    }
    const found = (await predict.run(inputs)).get("prediction");
    if (found === undefined) return;
    const outputs = found.shape[2];
    const logits = found.data.subarray(prompt.words.length * outputs, (prompt.words.length + 1) * outputs);
    const suggested = person.suggest(logits, prompt.words, SUGGESTED, letters);
    const lines = suggested.map(chip), shown = Array.from(chips.children, (line) => line.innerHTML);
    if (lines.map((line) => line.innerHTML).join() !== shown.join()) chips.replaceChildren(...lines); // else one may be pressed just now
    Object.assign(/** @type {any} */ (globalThis).fedrecon ?? {}, { words: suggested, after: words.join(" "), letters });
  };

  /** @param {import("./words.js").Suggestion} one */
  const chip = ({ word, probability, personal }) => {
    const button = element("button", { class: personal ? "chip own" : "chip", type: "button", text: word });
    button.setAttribute("aria-label", `${word}, ${(100 * probability).toFixed(0)} percent${personal ? ", your word" : ""}`);
    button.addEventListener("click", () => {
      const { letters } = current(); // some may have been typed since the word was suggested
      const before = letters && word.startsWith(letters) ? text.value.slice(0, -letters.length) : text.value;
      const gap = before === "" || /\s$/.test(before) ? "" : " ";
      text.value = `${before}${gap}${word} `;
      text.focus();
      unfinished = endOf(text.value);
      enqueue(suggest);
    });
    const line = element("li", {});
    line.append(button);
    return line;
  };

  let queue = Promise.resolve();
  /** @param {() => Promise<void>} work */
  const enqueue = (work) => (queue = queue.then(work));

  /**
   * Learn the sentences of the text that are new.
   * @param {boolean} all whether the last sentence counts although it has no end
   */
  const take = (all) => {
    const end = endOf(text.value);
    const replaced = unfinished !== "" && !end.startsWith(unfinished) && !unfinished.startsWith(end);
    const kept = all || end === "" ? text.value : text.value.slice(0, text.value.length - end.length);
    const known = [...done];
    const now = splitText(kept);
    const fresh = now.filter((sentence) => {
      const place = known.indexOf(sentence.join(" "));
      if (place >= 0) known.splice(place, 1);
      return place < 0;
    });
    const finished = now.some((sentence) => sentence.join(" ") === (splitText(unfinished).at(-1) ?? []).join(" "));
    if (replaced && !finished) fresh.unshift(...splitText(unfinished));
    done = now.map((sentence) => sentence.join(" "));
    unfinished = all ? "" : end;
    if (fresh.length === 0) return;
    enqueue(async () => {
      await learn(fresh);
      store.keep(sentences);
      onChange();
      await suggest();
    });
  };

  let timer = 0;
  text.addEventListener("input", (event) => {
    const pasted = PASTED.test(/** @type {InputEvent} */ (event).inputType ?? "");
    take(pasted || splitText(text.value).length - done.length > 1 + Number(unfinished !== "")); // nobody types several sentences at once
    clearTimeout(timer);
    timer = setTimeout(() => enqueue(suggest), PAUSE);
  });
  const show = async () => {
    local = new Map(bundle.start);
    person = new PersonalWords(vocabulary);
    sentences = [];
    await learn(store.kept(isSentence));
    await suggest();
  };
  await show();
  at("writing").hidden = false;
  return { show, describe: () => counted(sentences.length, "sentence"), columns: () => vocabulary.columns(sentences) };
}

/** @param {string} line whether a sentence ends at the end of it */
function endsSentence(line) {
  return line === "" || /[.!?]["')\]]*\s+$/.test(line);
}

/** @param {string} written @returns {string} the sentence that is not finished: what comes after the last end of one */
function endOf(written) {
  const line = written.split(/\n/).at(-1) ?? "";
  return line.split(/(?<=[.!?]["')\]]*\s)/).at(-1)?.trimStart() ?? "";
}

/** @type {(example: any) => example is string[]} */
const isSentence = /** @type {any} */ (
  (/** @type {any} */ words) => Array.isArray(words) && words.every((word) => typeof word === "string")
);
