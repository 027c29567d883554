// The device plan: what a device agrees to when it trains, checked before anything relies on it, as plan.py does.
// @ts-check

/**
 * @typedef {import("./keys.js").Key} Key
 * @typedef {{dtype: string, shape: number[]}} Type
 * @typedef {{support: number[], query: number[]}} Sides entry n is for a person with n examples
 * @typedef {Object} Split
 * @property {Sides} counts
 * @property {Sides} begins
 * @property {number[] | null} pattern
 * @property {string | null} by
 * @property {boolean} redrawn
 * @typedef {{features: string[], table: number, capacity: number, support: boolean}} Rows
 * @typedef {{at: number, values: string, ids?: string, count?: string}} Part
 * @typedef {Object} Plan
 * @property {string} format
 * @property {number} version
 * @property {number} rounds
 * @property {{support: number, query: number, most: number, columns: Record<string, Type>}} examples
 * @property {Split} split
 * @property {Record<string, Rows>} rows
 * @property {Record<string, Type>} state
 * @property {Key} state_key
 * @property {{length: number, dtype: string, layout: Part[]}} vector
 * @property {{protocol: "open" | "two-servers", bits: number, helper: string | null, least: number}} sum
 * @property {{variance: number, least: number, epsilon: number, delta: number} | null} noise
 * @property {{reports_per_day: number, min_examples: number}} limits
 */

export const MOST_REPORTS = 1000; // that a device remembers at least; a day cannot have more
const MOST_NUMBERS = 2 ** 27, MOST_VARIANCE = 2 ** 60, SIDES = /** @type {const} */ (["support", "query"]);
const COLUMN_TYPES = ["float32", "int32", "int64", "int16", "bool"];

/**
 * Read a device plan and check what devices rely on.
 * @param {string} text
 * @returns {Plan}
 */
export function readPlan(text) {
  const plan = JSON.parse(text);
  expect(isObject(plan) && plan.format === "fedrecon-device-plan", "format", "fedrecon-device-plan");
  expect(plan.version === 1, "version", "1; update this runtime");
  expect(typeof plan.graph === "string", "graph", "the digest of update.onnx");
  whole(plan, "rounds");
  checkExamples(object(plan, "examples"));
  checkSplit(object(plan, "split"), plan.examples);
  checkRows(object(plan, "rows"), plan.examples.columns);
  checkVector(object(plan, "vector"));
  checkSum(object(plan, "sum"));
  expect("noise" in plan, "noise", "null, or an object");
  if (plan.noise !== null) checkNoise(object(plan, "noise"), plan);
  const limits = object(plan, "limits"), often = whole(limits, "reports_per_day");
  expect(often >= 1 && often <= MOST_REPORTS, "limits.reports_per_day", `1 to ${MOST_REPORTS}`);
  whole(limits, "min_examples");
  if (Object.keys(object(plan, "state")).length > 0) {
    expect(allBelow(plan.state_key, 2 ** 32) && plan.state_key.length === 2, "state_key", "two 32-bit words");
  }
  return plan;
}

/** @param {boolean} fine @param {string} name @param {string} what */
function expect(fine, name, what) {
  if (!fine) throw new Error(`plan.json: \`${name}\` is damaged; expected ${what}`);
}

/** @param {any} value */
function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** @param {any} parent @param {string} name */
function object(parent, name) {
  expect(isObject(parent[name]), name, "an object");
  return parent[name];
}

/** @param {any} value */
function isWhole(value) {
  return Number.isInteger(value) && value >= 0 && value < 2 ** 62;
}

/** @param {any} parent @param {string} name @returns {number} */
function whole(parent, name) {
  expect(isWhole(parent[name]), name, "a whole number of at least 0");
  return parent[name];
}

/** @param {any} numbers @param {number} limit */
function allBelow(numbers, limit) {
  return Array.isArray(numbers) && numbers.every((number) => Number.isInteger(number) && number >= 0 && number < limit);
}

/** @param {any} examples */
function checkExamples(examples) {
  const columns = Object.entries(object(examples, "columns"));
  expect(columns.length > 0, "examples.columns", "at least one column");
  const room = [...SIDES, "most"].reduce((sum, side) => sum + whole(examples, side), 0);
  let width = 0;
  for (const [name, about] of columns) {
    const fine = isObject(about) && COLUMN_TYPES.includes(about.dtype) && Array.isArray(about.shape);
    const shaped = fine && about.shape.length <= 8 && about.shape.every(isWhole);
    expect(shaped, `examples.columns.${name}`, `a dtype of ${COLUMN_TYPES.join(", ")} and a shape`);
    width += about.shape.reduce((/** @type {number} */ product, /** @type {number} */ n) => product * n, 1);
  }
  expect(room <= MOST_NUMBERS && room * width <= MOST_NUMBERS, "examples", `at most ${MOST_NUMBERS} numbers`);
}

/**
 * Check that positions are those of a person's examples, whatever their number.
 * @param {any} split
 * @param {any} examples
 */
function checkSplit(split, examples) {
  const { most, columns } = examples, by = split.by ?? null, pattern = split.pattern ?? null;
  const byColumn = typeof by === "string" && Object.hasOwn(columns, by) && columns[by].shape.length === 0;
  expect(by === null || byColumn, "split.by", "a column of numbers, or null");
  expect(typeof split.redrawn === "boolean", "split.redrawn", "true or false");
  expect(pattern === null || allBelow(pattern, 2 ** 32), "split.pattern", "positions, or null");
  for (const side of SIDES) {
    for (const field of ["counts", "begins"]) {
      const numbers = object(split, field)[side];
      const fine = allBelow(numbers, most + 1) && numbers.length === most + 1;
      expect(fine, `split.${field}.${side}`, `${most + 1} numbers up to ${most}`);
    }
    const counts = split.counts[side].map((/** @type {number} */ count) => Math.min(count, examples[side]));
    const largest = counts.reduce((/** @type {number} */ a, /** @type {number} */ b) => Math.max(a, b));
    expect(pattern === null || largest <= pattern.length, "split.pattern", `${largest} positions`);
    /** @type {number[]} of so many examples, the farthest position from where the side begins */
    const farthest = [-1];
    for (let k = 0; k < largest; k++) farthest.push(pattern === null ? k : Math.max(farthest[k], pattern[k]));
    const inside = counts.every((/** @type {number} */ count, /** @type {number} */ size) =>
      count === 0 || split.begins[side][size] + farthest[count] < size,
    );
    expect(inside, `split.begins.${side}`, "positions of a person's examples");
  }
}

/** @param {any} groups @param {any} columns */
function checkRows(groups, columns) {
  for (const [group, rows] of Object.entries(groups)) {
    const features = isObject(rows) ? rows.features : null;
    const integers = (/** @type {any} */ name) =>
      typeof name === "string" && Object.hasOwn(columns, name) && columns[name].dtype === "int32";
    const fine = Array.isArray(features) && features.length > 0 && features.every(integers);
    expect(fine, `rows.${group}.features`, "columns of integers");
    expect(typeof rows.support === "boolean", `rows.${group}.support`, "true or false");
    expect(whole(rows, "table") < 2 ** 31, `rows.${group}.table`, "fewer rows");
    expect(whole(rows, "capacity") <= MOST_NUMBERS, `rows.${group}.capacity`, "fewer rows");
  }
}

/** @param {any} vector */
function checkVector(vector) {
  const length = whole(vector, "length"), kinds = ["at,values", "at,count,ids,values"];
  expect(length > 0 && length <= MOST_NUMBERS, "vector.length", `1 to ${MOST_NUMBERS}`);
  expect(["uint32", "float32"].includes(vector.dtype), "vector.dtype", "uint32 or float32");
  const fits = (/** @type {any} */ entry) =>
    isObject(entry) && kinds.includes(Object.keys(entry).sort().join()) && allBelow([entry.at], length) &&
    Object.entries(entry).every(([field, name]) => field === "at" || typeof name === "string");
  expect(Array.isArray(vector.layout) && vector.layout.every(fits), "vector.layout", "names of outputs and their places");
}

/** @param {any} sum */
function checkSum(sum) {
  expect(["open", "two-servers"].includes(sum.protocol), "sum.protocol", "open or two-servers");
  expect([20, 24, 32].includes(sum.bits), "sum.bits", "20, 24 or 32");
  const open = sum.protocol === "open", helper = sum.helper ?? null;
  const fine = open ? helper === null : typeof helper === "string" && /^[0-9a-f]{64}$/.test(helper);
  expect(fine, "sum.helper", "a key of 64 digits");
  expect(whole(sum, "least") >= 2 || open, "sum.least", "2 or more, since the sum of one report is the report");
}

/** @param {any} noise @param {any} plan */
function checkNoise(noise, plan) {
  for (const [name, most] of /** @type {const} */ ([["variance", MOST_VARIANCE], ["epsilon", Infinity], ["delta", 1]])) {
    const value = noise[name], fine = typeof value === "number" && value > 0 && value <= most;
    expect(fine, `noise.${name}`, `a number above 0${most < Infinity ? `, at most ${most}` : ""}`);
  }
  const least = whole(noise, "least");
  expect(least >= 1 && least <= plan.sum.least, "noise.least", "1 or more, and no more than the reports of a sum");
  expect(plan.vector.dtype === "uint32", "vector.dtype", "uint32, since noise is added to integers");
}
