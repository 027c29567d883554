// Reconstruction for ratings and clicks in plain JavaScript: gradient descent and least squares, from the settings of a bundle.
// @ts-check

/**
 * @typedef {import("./bundle.js").Bundle} Bundle
 * @typedef {Object} Factorization
 * @property {number} dim
 * @property {number} items
 * @property {Float32Array} embedding one row per item
 * @property {Float32Array | null} bias of the items, in a model with biases
 * @property {number} mean
 * @property {Float32Array | null} traits one row per item, what is known about it, in a model with traits
 * @property {number} width how many traits an item has
 * @property {Standard | null} standard what ratings are brought to before anything is solved for
 * @property {boolean} counts whether ratings are counts, of which the model has learned log(1 + x)
 * @property {Float64Array} start the bias first if there is one, then the embedding, then what is made of traits
 * @property {((item: number, weight: number, into: Float64Array) => void) | null} evidence
 * @property {Float64Array} ridges one for each number of `start`, for least squares
 * @property {Float64Array | null} everything what an embedding costs on all items, as a matrix, in a model of clicks
 * @property {Float32Array | null} history one row per item, what having it says beyond its embedding, in the same
 * @property {Float32Array | null} popularity of the items, in the same
 * @property {Float32Array | null} blend the weights of popularity, by how many items a person has
 * @property {Record<string, any>} settings
 */

/**
 * @typedef {Object} Standard
 * @property {number} mean
 * @property {number} deviation
 */

const HIGHEST_LOG = 80; // as in the graphs: higher predictions are cut to this

/**
 * Find the parts of a factorization in a bundle.
 * @param {Bundle} bundle
 * @returns {Factorization}
 */
export function factorization(bundle) {
  const embedding = bundle.table("item_embedding");
  const own = bundle.start.get("user_embedding");
  if (embedding === null || own === undefined) throw new Error("this bundle has no factorization model");
  const [items, dim] = embedding.shape;
  const bias = bundle.table("item_bias")?.data ?? null;
  const traits = bundle.table("item_traits");
  const coefficients = traits ? Array.from(bundle.start.get("user_traits")?.data ?? []) : [];
  const start = Float64Array.from([
    ...(bias ? [bundle.start.get("user_bias")?.data[0] ?? 0] : []),
    ...own.data,
    ...coefficients,
  ]);
  const settings = bundle.manifest.reconstruct;
  const found = settings.ridges ?? null; // of round zero, times the ridge of the settings
  const ridges = Float64Array.from(
    found
      ? [...(bias ? [found.bias] : []), ...new Array(dim).fill(found.embedding), ...found.traits]
      : new Array(start.length).fill(settings.ridge),
  );
  const rows = bundle.table("evidence/user_embedding")?.data;
  const biases = bundle.table("evidence/user_bias")?.data;
  const evidence = rows
    ? (/** @type {number} */ item, /** @type {number} */ weight, /** @type {Float64Array} */ into) => {
        const first = bias ? 1 : 0;
        if (bias && biases) into[0] += weight * biases[item];
        for (let k = 0; k < dim; k++) into[first + k] += weight * rows[item * dim + k];
      }
    : null;
  const mean = bundle.table("mean")?.data[0] ?? 0;
  const gram = bundle.table("gram");
  return {
    dim,
    items,
    embedding: embedding.data,
    bias,
    mean,
    traits: traits?.data ?? null,
    width: coefficients.length,
    standard: settings.standard ?? null,
    counts: settings.transform === "log1p",
    start,
    evidence,
    ridges,
    everything: gram && Float64Array.from(gram.data, (value) => settings.unobserved * value),
    history: bundle.table("history_offset")?.data ?? null,
    popularity: bundle.table("item_popularity")?.data ?? null,
    blend: bundle.table("popularity_weight")?.data ?? null,
    settings,
  };
}

/**
 * Predict one rating. It may be outside the scale: clipped, the best items would all be the same.
 * @param {Factorization} model
 * @param {Float64Array} local
 * @param {number} item
 */
export function predict(model, local, item) {
  const { mean, deviation } = model.standard ?? { mean: 0, deviation: 1 };
  const found = mean + deviation * inner(model, local, item);
  return model.counts ? Math.expm1(Math.min(found, HIGHEST_LOG)) : found;
}

/**
 * Predict one rating as it is solved for: of mean 0 and deviation 1 in a model with a scale.
 * @param {Factorization} model
 * @param {Float64Array} local
 * @param {number} item
 */
function inner(model, local, item) {
  const first = model.bias ? 1 : 0;
  let sum = 0;
  for (let k = 0; k < model.dim; k++) sum += model.embedding[item * model.dim + k] * local[first + k];
  const last = first + model.dim;
  if (model.popularity && local.length > last) return sum + (model.popularity[item] - sum) * local[last];
  for (let k = 0; model.traits && k < model.width; k++) sum += model.traits[item * model.width + k] * local[last + k];
  return model.bias ? sum + model.bias[item] + model.mean + local[0] : sum;
}

/**
 * Predict the ratings of all items.
 * @param {Factorization} model
 * @param {Float64Array} local
 * @returns {Float32Array}
 */
export function predictAll(model, local) {
  const scores = new Float32Array(model.items);
  for (let item = 0; item < model.items; item++) scores[item] = predict(model, local, item);
  return scores;
}

/**
 * Reconstruct a person's local parameters.
 * @param {Factorization} model
 * @param {number[]} items
 * @param {number[]} ratings in a model of clicks how often, 1 if that is not known
 * @returns {Float64Array} the bias first if there is one, then the embedding, then what is made of traits; in a
 *   model of clicks the weight of popularity
 */
export function reconstruct(model, items, ratings) {
  const { mean, deviation } = model.standard ?? { mean: 0, deviation: 1 };
  const learned = model.counts ? ratings.map((count) => Math.log1p(Math.max(count, 0))) : ratings;
  const targets = learned.map((rating) => (rating - mean) / deviation);
  const start = Float64Array.from(model.start);
  if (model.evidence) {
    const weight = 1 / Math.sqrt(1 + items.length);
    for (const item of items) model.evidence(item, weight, start);
  }
  if (model.everything) {
    const ones = ratings.map(() => 1);
    const own = items.length ? leastSquares(model, start, items, ones, ratings.map(weigh(model))) : start;
    return Float64Array.from([...own, popularityWeight(model, items.length)]);
  }
  if (items.length === 0) return start;
  const least = model.settings.solver === "least-squares";
  return least ? leastSquares(model, start, items, targets) : descend(model, start, items, targets);
}

/**
 * Return what a prediction is multiplied by: 1 for the bias if there is one, the item's embedding, its traits.
 * @param {Factorization} model
 * @param {number} item
 */
function slope(model, item) {
  const row = model.embedding.subarray(item * model.dim, (item + 1) * model.dim);
  const traits = model.traits ? model.traits.subarray(item * model.width, (item + 1) * model.width) : [];
  return [...(model.bias ? [1] : []), ...row, ...traits];
}

/**
 * Return how much popularity counts in a model of clicks, for a person with so many items.
 * @param {Factorization} model
 * @param {number} number
 */
function popularityWeight(model, number) {
  const after = model.settings.blend_after.filter((/** @type {number} */ least) => number >= least).length - 1;
  return model.blend ? model.blend[after] : 0;
}

/**
 * Return what a click weighs, by how often it happened.
 * @param {Factorization} model
 * @returns {(count: number) => number}
 */
function weigh(model) {
  return model.settings.counts === "log" ? (count) => 1 + Math.log(Math.max(count, 1)) : () => 1;
}

/**
 * Minimise squared errors plus `ridge` times the squared distance from the start, at once; in a model of clicks also
 * the squared scores of all items.
 * @param {Factorization} model
 * @param {Float64Array} start
 * @param {number[]} items
 * @param {number[]} ratings
 * @param {number[] | null} weights
 */
function leastSquares(model, start, items, ratings, weights = null) {
  const size = start.length;
  const system = Array.from({ length: size }, (_, i) => {
    const row = new Float64Array(size + 1);
    if (model.everything) row.set(model.everything.subarray(i * size, (i + 1) * size));
    for (let j = 0; j < size; j++) row[size] += row[j] * start[j];
    row[i] += model.ridges[i];
    return row;
  });
  items.forEach((item, k) => {
    const x = slope(model, item);
    const weight = weights ? weights[k] : 1;
    const error = inner(model, start, item) - ratings[k];
    for (let i = 0; i < size; i++) {
      const part = weight * x[i];
      for (let j = 0; j < size; j++) system[i][j] += part * x[j];
      system[i][size] += part * error;
      if (model.history) system[i][size] -= weight * model.history[item * size + i];
    }
  });
  for (let k = 0; k < size; k++) {
    for (let j = size; j >= k; j--) system[k][j] /= system[k][k];
    for (let i = 0; i < size; i++) {
      const factor = system[i][k];
      if (i === k || factor === 0) continue;
      for (let j = k; j <= size; j++) system[i][j] -= factor * system[k][j];
    }
  }
  return start.map((value, i) => value - system[i][size]);
}

/**
 * Descend the mean squared error in batches, in the order of the ratings.
 * @param {Factorization} model
 * @param {Float64Array} local
 * @param {number[]} items
 * @param {number[]} ratings
 */
function descend(model, local, items, ratings) {
  const { batch_size: size, epochs, steps } = model.settings;
  const batches = Math.ceil(items.length / size);
  const todo = Math.min(batches * epochs, steps ?? Infinity);
  const step = optimizer(model.settings, local.length);
  for (let t = 0; t < todo; t++) {
    const from = (t % batches) * size;
    const to = Math.min(from + size, items.length);
    const gradient = new Float64Array(local.length);
    for (let k = from; k < to; k++) {
      const x = slope(model, items[k]);
      const error = (2 * (inner(model, local, items[k]) - ratings[k])) / (to - from);
      for (let i = 0; i < x.length; i++) gradient[i] += error * x[i];
    }
    step(local, gradient);
  }
  return local;
}

/**
 * Return a step of the optimizer that settings name, as in optax.
 * @param {Record<string, any>} settings
 * @param {number} size
 * @returns {(local: Float64Array, gradient: Float64Array) => void}
 */
function optimizer({ optimizer: name, learning_rate: rate }, size) {
  const first = new Float64Array(size);
  const second = new Float64Array(size).fill(name === "adagrad" ? 0.1 : 0);
  let t = 0;
  /** @type {Record<string, (g: number, i: number) => number>} */
  const updates = {
    sgd: (g) => g,
    momentum: (g, i) => (first[i] = g + 0.9 * first[i]),
    adagrad: (g, i) => g / Math.sqrt((second[i] += g * g) + 1e-7),
    adam: (g, i) => {
      first[i] = 0.9 * first[i] + 0.1 * g;
      second[i] = 0.999 * second[i] + 0.001 * g * g;
      return first[i] / rest(0.9, t) / (Math.sqrt(second[i] / rest(0.999, t)) + 1e-8);
    },
  };
  const update = updates[name];
  if (update === undefined) throw new Error(`this page does not know the optimizer ${name}`);
  return (local, gradient) => {
    t += 1;
    for (let i = 0; i < size; i++) local[i] -= rate * update(gradient[i], i);
  };
}

/**
 * Return 1 - decay ** t as optax computes it, in float32: so near to 1, its rounding shows in the fifth digit.
 * @param {number} decay
 * @param {number} t
 */
function rest(decay, t) {
  return Math.fround(1 - Math.fround(Math.fround(decay) ** t));
}
