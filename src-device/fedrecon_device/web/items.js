// Ratings, counts and clicks: find items, rate or choose them, and see what is recommended and why.
// @ts-check

import { clipped, find, fold, nearest, rank } from "./ranking.js";
import { factorization, predictAll, reconstruct } from "./solvers.js";
import * as store from "./store.js";
import { at, counted, element, picker, rater, refill, say, written } from "./widgets.js";

/**
 * @typedef {import("./bundle.js").Bundle} Bundle
 * @typedef {[number | string, number]} Example an item's id, and its rating, count, or 1
 */

const SHOWN = 8, MORE = 10;

/** What the page says, by what people enter. */
const SAID = {
  ratings: {
    part: "Rate",
    heading: "Rate what you know",
    often: "Often rated",
    mine: "Your ratings",
    begin: "Rate three or four titles to begin. Recommendations change with every rating.",
    example: "rating",
    by: "rating",
  },
  counts: {
    part: "Enter",
    heading: "Enter what you know",
    often: "Often entered",
    mine: "Your numbers",
    begin: "Enter three or four numbers to begin. Recommendations change with every number.",
    example: "number",
    by: "number",
  },
  clicks: {
    part: "Choose",
    heading: "Choose what you have",
    often: "What many have",
    mine: "What you have",
    begin: "Choose three or four titles to begin. Recommendations change with every choice.",
    example: "title",
    by: "owner",
  },
};

/**
 * Show the page of a model that ranks items.
 * @param {Bundle} bundle
 * @param {{onChange: () => void}} page
 */
export async function showItems(bundle, { onChange }) {
  const { ids, labels, counts } = await readItems(bundle);
  const index = new Map(ids.map((id, k) => [id, k]));
  const folded = labels.map(fold);
  const model = factorization(bundle);
  const clicks = bundle.manifest.task === "clicks";
  const said = SAID[clicks ? "clicks" : model.counts ? "counts" : "ratings"];
  const { scale, least_count: least, examples } = bundle.manifest;
  const often = counts === null ? [] : rank(counts, 200);
  let top = MORE;
  /** @type {number[]} */
  let listed = [];

  const search = /** @type {HTMLInputElement} */ (at("search"));
  const [results, found, rated, best, more] = ["results", "found", "rated", "best", "more"].map(at);

  /** @type {(example: any) => example is Example} */
  const valid = /** @type {any} */ ((/** @type {any} */ one) => Array.isArray(one) && Number.isFinite(one[1]));

  /** @returns {[number, number][]} item and rating, oldest first; ids that this model does not know are left out */
  const ratings = () =>
    store
      .kept(valid)
      .filter(([id]) => index.has(id))
      .map(([id, rating]) => [/** @type {number} */ (index.get(id)), rating]);

  /** @param {number} item @param {number | null} rating */
  const rate = (item, rating) => {
    const others = store.kept(valid).filter(([id]) => id !== ids[item]);
    store.keep(rating === null ? others : [...others, [ids[item], rating]]);
    top = MORE;
    showListed();
    showRated();
    showBest();
    const change = rating === null ? "removed" : clicks ? "chosen" : String(rating);
    say(`${labels[item]}: ${change}. Recommendations changed.`);
    onChange();
  };

  /** @param {number} item @param {number | null} rating @param {string} place */
  const row = (item, rating, place) => {
    const line = element("li", { class: clicks ? "film choice" : "film" });
    const name = `${place}-${item}`;
    line.append(element("span", { class: "title", text: labels[item] }));
    if (!clicks) line.append(rater(name, labels[item], scale, rating, (value) => rate(item, value), model.counts));
    else if (place === "found") line.append(picker(name, labels[item], rating !== null, (has) => rate(item, has ? 1 : null)));
    if (place === "rated") line.append(remover(item));
    return line;
  };

  /** @param {number} item */
  const remover = (item) => {
    const remove = element("button", { class: "remove", text: "×", type: "button" });
    remove.setAttribute("aria-label", clicks ? `Remove ${labels[item]}` : `Remove your ${said.example} for ${labels[item]}`);
    remove.addEventListener("click", () => {
      rate(item, null);
      search.focus();
    });
    return remove;
  };

  const showResults = () => {
    const query = search.value.trim();
    const known = new Map(ratings());
    listed = query ? find(folded, query, counts, SHOWN) : often.filter((k) => !known.has(k)).slice(0, SHOWN);
    showListed();
    found.textContent = query
      ? listed.length === 0 ? `No title has “${query}”.` : `Found for “${query}”`
      : often.length ? said.often : "Search for something you know";
  };

  const showListed = () => {
    const known = new Map(ratings());
    refill(results, listed.map((item) => row(item, known.get(item) ?? null, "found")));
  };

  const showRated = () => {
    const mine = ratings().reverse();
    refill(rated, mine.map(([item, rating]) => row(item, rating, "rated")));
    at("rated-heading").textContent = mine.length === 0 ? said.mine : `${said.mine} (${mine.length})`;
    at("rated-none").hidden = mine.length > 0;
  };

  const showBest = () => {
    const mine = ratings();
    const newest = mine.slice(-examples.most);
    const begun = performance.now();
    const local = reconstruct(model, newest.map(([item]) => item), newest.map(([, rating]) => rating));
    const scores = predictAll(model, local);
    const took = performance.now() - begun;
    const leftOut = mine.map(([item]) => item);
    const chosen = rank(scores, top, { leftOut, counts, least });
    const mean = mine.reduce((sum, [, rating]) => sum + rating, 0) / Math.max(1, mine.length);
    const liked = mine.filter(([, rating]) => rating >= mean).map(([item]) => item);
    const ends = scale ?? [0, Math.max(1e-6, scores[chosen[0]] ?? 1)]; // without a scale, bars compare with the best
    const shown = mine.length ? chosen.map((item) => recommendation(item, scores[item], ends, liked)) : [];
    best.replaceChildren(...shown);
    at("best-none").hidden = mine.length > 0;
    at("best-rare").hidden = mine.length === 0 || chosen.length > 0;
    at("best-rare").textContent = `Nothing to recommend: a title needs at least ${counted(least, said.by)} among others.`;
    more.hidden = mine.length === 0 || chosen.length < top;
    Object.assign(globalThis, { fedrecon: { local: Array.from(local), scores, best: chosen, took } }); // for tests
  };

  /** @param {number} item @param {number} score @param {[number, number]} ends @param {number[]} among */
  const recommendation = (item, score, ends, among) => {
    const shown = clipped(score, ends);
    const line = element("li", { class: "advice", tabindex: "-1" });
    const [low, high, here] = [...ends, shown].map((value) => (model.counts ? Math.log1p(value) : value));
    const meter = element("meter", { min: String(low), max: String(high), value: String(here) });
    meter.setAttribute("aria-hidden", "true"); // the number beside it or the order says the same
    line.append(element("span", { class: "title", text: labels[item] }));
    line.append(element("span", { class: "score", text: clicks ? "" : written(shown, model.counts) }), meter);
    const near = nearest(model.embedding, model.dim, item, among);
    if (near.length) {
      const known = new Map(ratings());
      const names = near.map((k) => (clicks ? labels[k] : `${labels[k]} (${known.get(k)?.toLocaleString("en")})`));
      line.append(element("span", { class: "why", text: `close to ${names.join(" · ")}` }));
    }
    return line;
  };

  search.addEventListener("input", showResults);
  search.form?.addEventListener("submit", (event) => event.preventDefault());
  more.addEventListener("click", () => {
    top += MORE;
    const before = best.children.length;
    showBest();
    /** @type {HTMLElement | undefined} */ (best.children[before])?.focus();
    say(`${best.children.length} recommendations`);
  });
  const show = () => {
    showResults();
    showRated();
    showBest();
  };
  show();
  at("rate-heading").textContent = said.heading;
  at("rate-part").textContent = said.part;
  at("best-none").textContent = said.begin;
  at("items").hidden = false;
  at("parts").hidden = false;
  const columns = () => {
    const mine = ratings();
    return { item: Int32Array.from(mine, ([item]) => item), rating: Float32Array.from(mine, ([, rating]) => rating) };
  };
  return { show, describe: () => counted(ratings().length, said.example), columns };
}

/**
 * Read what items are called.
 * @param {Bundle} bundle
 * @returns {Promise<{ids: (number | string)[], labels: string[], counts: number[] | null}>}
 */
async function readItems(bundle) {
  const { ids: given, labels, counts } = await bundle.json("items.json.zlib");
  const ids = Array.isArray(given) ? given : Array.from({ length: given.count }, (_, k) => given.first + k);
  return { ids, labels: labels ?? ids.map(String), counts };
}
