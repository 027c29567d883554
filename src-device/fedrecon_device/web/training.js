// The client's part of a training round: split the examples, list the rows they touch, run the graph, lay out the vector.
// @ts-check

import { clientKey, redrawnOrder } from "./keys.js";
import { loadGraphs } from "./onnx.js";

/**
 * @typedef {import("./bundle.js").Tensor} Tensor
 * @typedef {import("./keys.js").Key} Key
 * @typedef {import("./onnx.js").Graph} Graph
 * @typedef {import("./onnx.js").Input} Input
 * @typedef {Int32Array | Float32Array} Values
 * @typedef {Record<string, Values>} Columns all examples of a person, oldest first, one array for each feature
 * @typedef {import("./plan.js").Part} Part
 * @typedef {import("./plan.js").Plan} Plan
 * @typedef {import("./plan.js").Rows} Rows
 * @typedef {import("./plan.js").Split} Split
 */

/**
 * Return the order in which a split takes examples.
 * @param {Split} split
 * @param {Columns} columns
 * @param {number} size
 * @param {Key} key of the round
 * @param {string} name of the client
 */
function orderOf(split, columns, size, key, name) {
  if (split.redrawn) return redrawnOrder(key, name, size);
  const order = Array.from({ length: size }, (_, k) => k);
  const by = split.by ? columns[split.by] : null;
  return by === null ? order : order.sort((a, b) => by[a] - by[b] || a - b);
}

/**
 * Return the inputs of the graph that a client's examples give.
 * @param {Plan} plan
 * @param {Columns} columns
 * @param {Key} key of the round
 * @param {string} name of the client
 * @returns {Map<string, Input>}
 */
export function packExamples(plan, columns, key, name) {
  const { columns: types, most } = plan.examples;
  const wide = (/** @type {string} */ feature) => types[feature].shape.reduce((product, n) => product * n, 1);
  const first = Object.keys(types)[0];
  const given = columns[first].length / wide(first), size = Math.min(given, most);
  const newest = Object.fromEntries(Object.keys(types).map((f) => [f, columns[f].slice((given - size) * wide(f))]));
  const order = orderOf(plan.split, newest, size, key, name);
  /** @type {Map<string, Input>} */
  const inputs = new Map();
  /** @type {Record<string, number[]>} the examples of each side */
  const sides = {};
  for (const side of /** @type {const} */ (["support", "query"])) {
    const room = plan.examples[side];
    const { counts, begins, pattern } = plan.split;
    const count = Math.min(counts[side][size], room), begin = begins[side][size];
    sides[side] = Array.from({ length: count }, (_, k) => order[begin + (pattern?.[k] ?? k)]);
    inputs.set(`${side}_count`, { data: Int32Array.of(sides[side].length), shape: [] });
    for (const feature of Object.keys(types)) {
      const data = gather(newest[feature], sides[side], wide(feature), room);
      inputs.set(`${side}/${feature}`, { data, shape: [room, ...types[feature].shape] });
    }
  }
  for (const [group, rows] of Object.entries(plan.rows)) listRows(plan, group, rows, newest, sides, inputs);
  return inputs;
}

/**
 * Return the values of some examples, padded with zeros.
 * @param {Values} values
 * @param {number[]} examples
 * @param {number} width numbers of an example
 * @param {number} room
 */
function gather(values, examples, width, room) {
  const data = values instanceof Float32Array ? new Float32Array(room * width) : new Int32Array(room * width);
  examples.forEach((k, place) => data.set(values.subarray(k * width, (k + 1) * width), place * width));
  return data;
}

/**
 * List the rows of a group of tables that examples touch, in order of first use, query before support.
 * @param {Plan} plan
 * @param {string} group
 * @param {Rows} rows
 * @param {Columns} columns
 * @param {Record<string, number[]>} sides
 * @param {Map<string, Input>} inputs where the lists go
 */
function listRows(plan, group, { features, table, capacity, support }, columns, sides, inputs) {
  /** @type {Map<number, number>} */
  const slotOf = new Map();
  const list = new Int32Array(capacity);
  for (const side of support ? ["query", "support"] : ["query"]) {
    const room = plan.examples[/** @type {"query" | "support"} */ (side)];
    const slots = features.map((feature) => {
      const { shape } = plan.examples.columns[feature];
      const data = new Int32Array(shape.reduce((product, n) => product * n, room));
      inputs.set(`${side === "query" ? "slots" : "support_slots"}/${feature}`, { data, shape: [room, ...shape] });
      return { ids: columns[feature], data, width: data.length / room };
    });
    sides[side].forEach((k, place) => {
      for (const { ids, data, width } of slots) {
        for (let j = 0; j < width; j++) {
          const id = ids[k * width + j];
          if (!(id >= 0 && id < table)) throw new Error(`${features} has id ${id}; the table has rows 0 to ${table - 1}`);
          let slot = slotOf.get(id);
          if (slot === undefined) {
            slot = slotOf.size;
            list[slot] = id;
            slotOf.set(id, slot);
          }
          data[place * width + j] = slot;
        }
      }
    });
  }
  if (slotOf.size > capacity) throw new Error(`the examples touch ${slotOf.size} rows of ${group}; the plan has room for ${capacity}`);
  inputs.set(`rows/${group}`, { data: list, shape: [capacity] });
  inputs.set(`num_rows/${group}`, { data: Int32Array.of(slotOf.size), shape: [] });
}

/**
 * Lay out what a graph returned as one row of numbers: all that leaves the device.
 * @param {Plan} plan
 * @param {Map<string, {data: any, shape: number[]}>} outputs
 * @returns {Uint32Array | Float32Array}
 */
export function layOut({ vector: { length, dtype, layout } }, outputs) {
  const output = (/** @type {string} */ name) => {
    const found = outputs.get(name);
    if (found === undefined) throw new Error(`the graph has no output ${name}`);
    return found.data;
  };
  const vector = dtype === "float32" ? new Float32Array(length) : new Uint32Array(length);
  for (const { at, values, ids, count } of layout) {
    const data = output(values);
    if (ids === undefined) {
      vector.set(data, at);
      continue;
    }
    const rows = output(ids), width = data.length / rows.length;
    const used = count === undefined ? rows.length : Number(output(count)[0]);
    for (let k = 0; k < used; k++) vector.set(data.subarray(k * width, (k + 1) * width), at + rows[k] * width);
  }
  return vector;
}

/** Runs the client's part of rounds. */
export class Trainer {
  /**
   * @param {Plan} plan
   * @param {Graph} graph
   * @param {(name: string) => Promise<Map<string, Tensor>>} [firstState] what the method keeps before the first round
   */
  constructor(plan, graph, firstState = async () => new Map()) {
    this.plan = plan;
    this.graph = graph;
    this.firstState = firstState;
  }

  /**
   * Load the graphs of a plan.
   * @param {import("./bundle.js").Bundle} bundle
   * @param {Plan} plan
   * @param {any} [runtime] the package onnxruntime-web, in node
   */
  static async open(bundle, plan, runtime) {
    const keeps = Object.keys(plan.state).length > 0;
    const [graph, first] = await loadGraphs(bundle, keeps ? ["update", "state"] : ["update"], runtime);
    return new Trainer(plan, graph, keeps ? (name) => drawState(bundle, plan, first, name) : undefined);
  }

  /**
   * Run one round.
   * @param {Columns} columns all examples of the person
   * @param {Map<string, Tensor>} message what the server sent, by path
   * @param {Key} key of the round
   * @param {string} name of the client
   * @param {Map<string, Tensor> | null} [state] what the method kept on this device in its last round; null before the first
   * @returns {Promise<{vector: Uint32Array | Float32Array, state: Map<string, Tensor>}>}
   */
  async update(columns, message, key, name, state = null) {
    const inputs = packExamples(this.plan, columns, key, name);
    inputs.set("key", keyInput(clientKey(key, name)));
    for (const [path, tensor] of message) inputs.set(`message/${path}`, tensor);
    for (const [path, tensor] of state ?? (await this.firstState(name))) inputs.set(`state/${path}`, tensor);
    const outputs = await this.graph.run(inputs);
    const next = Object.keys(this.plan.state).map((path) => [path, outputs.get(`new_state/${path}`)]);
    return { vector: layOut(this.plan, outputs), state: new Map(/** @type {any} */ (next)) };
  }
}

/**
 * Return what a method keeps on a device before its first round.
 * @param {import("./bundle.js").Bundle} bundle
 * @param {Plan} plan
 * @param {Graph} graph
 * @param {string} name
 * @returns {Promise<Map<string, Tensor>>}
 */
async function drawState(bundle, plan, graph, name) {
  await bundle.load();
  const inputs = new Map([...bundle.tables].map(([path, table]) => [`global/${path}`, /** @type {Input} */ (table)]));
  inputs.set("key", keyInput(clientKey(plan.state_key, name)));
  return new Map([...(await graph.run(inputs))].map(([output, tensor]) => [output.replace("state/", ""), tensor]));
}

/** @param {Key} key @returns {Input} */
function keyInput(key) {
  return { data: Int32Array.from(key, (word) => word | 0), shape: [2] };
}
