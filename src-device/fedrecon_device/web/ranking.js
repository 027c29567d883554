// The order of recommendations, what is left out of them, and why something is recommended.
// @ts-check

/**
 * Return the items with the highest scores, best first; among equal ones the lower number comes first.
 * @param {ArrayLike<number>} scores
 * @param {number} n
 * @param {{leftOut?: Iterable<number>, counts?: ArrayLike<number> | null, least?: number}} [options]
 * @returns {number[]}
 */
export function rank(scores, n, { leftOut = [], counts = null, least = 0 } = {}) {
  const unwanted = new Set(leftOut);
  const items = [];
  for (let k = 0; k < scores.length; k++) {
    if (Number.isFinite(scores[k]) && !unwanted.has(k) && (counts === null || counts[k] >= least)) items.push(k);
  }
  return items.sort((a, b) => scores[b] - scores[a] || a - b).slice(0, n);
}

/**
 * Return a score within the scale of the ratings.
 * @param {number} score
 * @param {[number, number] | null} scale
 */
export function clipped(score, scale) {
  return scale === null ? score : Math.min(Math.max(score, scale[0]), scale[1]);
}

/**
 * Return the items whose embeddings are closest in direction to that of `item`, closest first.
 * @param {Float32Array} table one row per item
 * @param {number} dim
 * @param {number} item
 * @param {number[]} among
 * @param {number} [n]
 * @returns {number[]}
 */
export function nearest(table, dim, item, among, n = 2) {
  const row = table.subarray(item * dim, (item + 1) * dim);
  /** @param {number} other */
  const cosine = (other) => {
    let product = 0, a = 0, b = 0;
    for (let k = 0; k < dim; k++) {
      const value = table[other * dim + k];
      product += row[k] * value;
      a += row[k] * row[k];
      b += value * value;
    }
    return a > 0 && b > 0 ? product / Math.sqrt(a * b) : 0;
  };
  return among
    .map((other, at) => ({ other, at, near: cosine(other) }))
    .filter(({ near }) => near > 0)
    .sort((x, y) => y.near - x.near || x.at - y.at)
    .slice(0, n)
    .map(({ other }) => other);
}

/**
 * Return titles that contain all words of a query: the exact title first, then those that begin with it, then the most
 * rated.
 * @param {string[]} folded titles as `fold` returns them
 * @param {string} query
 * @param {ArrayLike<number> | null} counts
 * @param {number} n
 * @returns {number[]}
 */
export function find(folded, query, counts, n) {
  const wanted = fold(query).trim();
  const words = wanted.split(/\s+/);
  const found = [];
  for (let k = 0; k < folded.length; k++) if (words.every((word) => folded[k].includes(word))) found.push(k);
  /** @param {number} k */
  const first = (k) => (folded[k] === wanted ? 0 : folded[k].startsWith(wanted) ? 1 : 2);
  return found.sort((a, b) => first(a) - first(b) || (counts ? counts[b] - counts[a] : 0) || a - b).slice(0, n);
}

/**
 * Return text in lower case and without accents.
 * @param {string} text
 */
export function fold(text) {
  return text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();
}
