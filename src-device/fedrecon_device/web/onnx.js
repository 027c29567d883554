// Graphs of a bundle in onnxruntime-web, which a bundle holds in web/vendor if it needs it.
// @ts-check

/**
 * @typedef {import("./bundle.js").Bundle} Bundle
 * @typedef {{data: Float32Array | Int32Array, shape: number[]}} Input
 */

/** A graph with named inputs. */
export class Graph {
  /** @param {any} ort @param {any} session @param {{inputs: {name: string, dtype: string}[]}} about */
  constructor(ort, session, about) {
    this.ort = ort;
    this.session = session;
    this.about = about;
  }

  /**
   * Run it; extra inputs are ignored.
   * @param {Map<string, Input>} inputs
   * @returns {Promise<Map<string, {data: Float32Array, shape: number[]}>>}
   */
  async run(inputs) {
    /** @type {Record<string, any>} */
    const feed = {};
    for (const { name, dtype } of this.about.inputs) {
      const given = inputs.get(name);
      if (given === undefined) throw new Error(`the graph needs the input ${name}`);
      feed[name] = new this.ort.Tensor(dtype, given.data, given.shape);
    }
    const found = await this.session.run(feed);
    return new Map(Object.entries(found).map(([name, one]) => [name, { data: one.data, shape: one.dims }]));
  }
}

/**
 * Load graphs of a bundle.
 * @param {Bundle} bundle
 * @param {string[]} names
 * @param {any} [runtime] onnxruntime-web, where it is a package as in node; by default that of the bundle
 * @returns {Promise<Graph[]>}
 */
export async function loadGraphs(bundle, names, runtime) {
  const ort = runtime ?? (await import(/* @vite-ignore */ new URL("./vendor/ort.wasm.min.mjs", import.meta.url).href));
  ort.env.wasm.numThreads = 1;
  if (runtime === undefined) ort.env.wasm.wasmPaths = new URL("./vendor/", import.meta.url).href;
  const graphs = [];
  for (const name of names) {
    const about = bundle.manifest.graphs[name];
    if (about?.file === undefined) throw new Error(`the bundle has no ${name} graph: ${about?.missing}`);
    const session = await ort.InferenceSession.create(new Uint8Array(await bundle.read(about.file)));
    graphs.push(new Graph(ort, session, about));
  }
  return graphs;
}
