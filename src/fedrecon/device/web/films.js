// Ratings: find and rate, see what is recommended and why.
// @ts-check

import { clipped, find, fold, nearest, rank } from "./ranking.js";
import { factorization, predictAll, reconstruct } from "./solvers.js";
import * as store from "./store.js";
import { counted, element, rater, refill, say, written } from "./widgets.js";

/** @typedef {import("./bundle.js").Bundle} Bundle */

const SHOWN = 8, MORE = 10;

/**
 * Show the page of a ratings model.
 * @param {Bundle} bundle
 * @param {{onChange: () => void}} page
 */
export async function showFilms(bundle, { onChange }) {
  const items = await bundle.json("items.json");
  const ids = Array.isArray(items.ids)
    ? items.ids
    : Array.from({ length: items.ids.count }, (_, k) => items.ids.first + k);
  /** @type {string[]} */
  const labels = items.labels ?? ids.map(String);
  /** @type {number[] | null} */
  const counts = items.counts;
  const index = new Map(ids.map((/** @type {number | string} */ id, /** @type {number} */ k) => [id, k]));
  const folded = labels.map(fold);
  const model = factorization(bundle);
  const { scale, least_count: least, examples } = bundle.manifest;
  const often = counts === null ? [] : rank(counts, 200);
  let top = MORE;
  /** @type {number[]} */
  let listed = [];

  const search = /** @type {HTMLInputElement} */ (document.getElementById("search"));
  const results = /** @type {HTMLElement} */ (document.getElementById("results"));
  const found = /** @type {HTMLElement} */ (document.getElementById("found"));
  const rated = /** @type {HTMLElement} */ (document.getElementById("rated"));
  const best = /** @type {HTMLElement} */ (document.getElementById("best"));
  const more = /** @type {HTMLButtonElement} */ (document.getElementById("more"));

  /** @returns {[number, number][]} item and rating, oldest first; ids that this model does not know are left out */
  const ratings = () =>
    store
      .kept(/** @type {[number | string, number][]} */ ([]))
      .filter(([id]) => index.has(id))
      .map(([id, rating]) => [/** @type {number} */ (index.get(id)), rating]);

  /** @param {number} item @param {number | null} rating */
  const rate = (item, rating) => {
    const others = store.kept(/** @type {[number | string, number][]} */ ([])).filter(([id]) => id !== ids[item]);
    store.keep(rating === null ? others : [...others, [ids[item], rating]]);
    top = MORE;
    showListed();
    showRated();
    showBest();
    say(rating === null ? `${labels[item]}: removed` : `${labels[item]}: ${rating}. Recommendations changed.`);
    onChange();
  };

  /** @param {number} item @param {number | null} rating @param {string} place */
  const row = (item, rating, place) => {
    const line = element("li", { class: "film" });
    line.append(element("span", { class: "title", text: labels[item] }));
    line.append(
      rater(`${place}-${item}`, labels[item], scale, rating, (value) => rate(item, value), model.counts),
    );
    if (place === "rated") {
      const remove = element("button", { class: "remove", text: "×", type: "button" });
      remove.setAttribute("aria-label", `Remove the rating of ${labels[item]}`);
      remove.addEventListener("click", () => {
        rate(item, null);
        search.focus();
      });
      line.append(remove);
    }
    return line;
  };

  const showResults = () => {
    const query = search.value.trim();
    const known = new Map(ratings());
    listed = query ? find(folded, query, counts, SHOWN) : often.filter((k) => !known.has(k)).slice(0, SHOWN);
    showListed();
    found.textContent = query
      ? listed.length === 0 ? `Nothing is called “${query}”.` : `Found for “${query}”`
      : often.length ? "Often rated" : "Search for something you know";
  };

  const showListed = () => {
    const known = new Map(ratings());
    refill(results, listed.map((item) => row(item, known.get(item) ?? null, "found")));
  };

  const showRated = () => {
    const mine = ratings().reverse();
    refill(rated, mine.map(([item, rating]) => row(item, rating, "rated")));
    const heading = /** @type {HTMLElement} */ (document.getElementById("rated-heading"));
    const called = model.counts ? "Your numbers" : "Your ratings";
    heading.textContent = mine.length === 0 ? called : `${called} (${mine.length})`;
    /** @type {HTMLElement} */ (document.getElementById("rated-none")).hidden = mine.length > 0;
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
    best.replaceChildren(...(mine.length ? chosen.map((item) => recommendation(item, scores[item], liked)) : []));
    /** @type {HTMLElement} */ (document.getElementById("best-none")).hidden = mine.length > 0;
    const rare = /** @type {HTMLElement} */ (document.getElementById("best-rare"));
    rare.hidden = mine.length === 0 || chosen.length > 0;
    rare.textContent = `Nothing to recommend: a title needs at least ${counted(least, "rating")} by others.`;
    more.hidden = mine.length === 0 || chosen.length < top;
    Object.assign(globalThis, { fedrecon: { local: Array.from(local), scores, best: chosen, took } }); // for tests
  };

  /** @param {number} item @param {number} score @param {number[]} among */
  const recommendation = (item, score, among) => {
    const shown = clipped(score, scale);
    const line = element("li", { class: "advice", tabindex: "-1" });
    const ends = scale ?? [Math.min(0, shown), Math.max(1, shown)];
    const [low, high, at] = [...ends, shown].map((value) => (model.counts ? Math.log1p(value) : value));
    const meter = element("meter", { min: String(low), max: String(high), value: String(at) });
    meter.setAttribute("aria-hidden", "true"); // the number beside it says the same
    line.append(element("span", { class: "title", text: labels[item] }));
    line.append(element("span", { class: "score", text: written(shown, model.counts) }), meter);
    const near = nearest(model.embedding, model.dim, item, among);
    if (near.length) {
      const known = new Map(ratings());
      const names = near.map((k) => `${labels[k]} (${known.get(k)?.toLocaleString("en")})`).join(" · ");
      line.append(element("span", { class: "why", text: `close to ${names}` }));
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
  if (model.counts) {
    /** @type {HTMLElement} */ (document.getElementById("rate-heading")).textContent = "Enter what you know";
    /** @type {HTMLElement} */ (document.getElementById("best-none")).textContent =
      "Enter three or four numbers to begin. What is recommended changes with every one.";
  }
  /** @type {HTMLElement} */ (document.getElementById("ratings")).hidden = false;
  /** @type {HTMLElement} */ (document.getElementById("parts")).hidden = false;
  return { show, describe: () => counted(ratings().length, model.counts ? "number" : "rating") };
}
