// A bundle in the browser: its manifest, tables and legend, each compared with its digest as it is read.
// @ts-check

/**
 * @typedef {{data: Float32Array, shape: number[]}} Tensor
 * @typedef {Object} Manifest
 * @property {string} task
 * @property {Record<string, any>} graphs
 * @property {Record<string, any>} reconstruct
 * @property {[number, number] | null} scale
 * @property {number} least_count
 * @property {{most: number, columns: Record<string, {dtype: string, shape: number[]}>}} examples
 * @property {Record<string, string>} roles
 * @property {Record<string, {bytes: number, sha256: string}>} files
 */

const MOST = 1 << 26; // bytes of a file once it is decompressed, as in Python

/** An open bundle. */
export class Bundle {
  /**
   * @param {Manifest} manifest
   * @param {(name: string) => Promise<ArrayBuffer>} read
   */
  constructor(manifest, read) {
    this.manifest = manifest;
    this.read = read;
    /** @type {Map<string, Tensor>} */
    this.tables = new Map();
    /** @type {Map<string, Tensor>} */
    this.start = new Map();
  }

  /** Read the tables. */
  async load() {
    const tensors = readTensors(await this.read("global.safetensors"));
    this.tables = underPrefix(tensors, "global/");
    this.start = underPrefix(tensors, "start/");
  }

  /**
   * Read a JSON file.
   * @param {string} name
   * @returns {Promise<any>}
   */
  async json(name) {
    const data = await this.read(name);
    return JSON.parse(new TextDecoder().decode(name.endsWith(".zlib") ? await inflated(name, data) : data));
  }

  /** The first digits of the model's digest, for people to compare. */
  get digest() {
    return this.manifest.files["global.safetensors"].sha256.slice(0, 12);
  }

  /**
   * Return the table with a role in a factorization; null if the model has none.
   * @param {string} role
   * @returns {Tensor | null}
   */
  table(role) {
    const path = this.manifest.roles[role];
    return path === undefined ? null : (this.tables.get(path) ?? null);
  }
}

/**
 * Open the bundle at an address, with its tables.
 * @param {URL} base
 * @returns {Promise<Bundle>}
 */
export async function openBundle(base) {
  const bundle = await openManifest(fetchFrom(base));
  await bundle.load();
  return bundle;
}

/**
 * Return a function that fetches files beside an address.
 * @param {URL} base
 * @returns {(name: string) => Promise<ArrayBuffer>}
 */
export function fetchFrom(base) {
  return async (name) => {
    const answer = await fetch(new URL(name, base));
    if (!answer.ok) throw new Error(`${name} is missing (${answer.status})`);
    return answer.arrayBuffer();
  };
}

/**
 * Open a bundle without its tables.
 * @param {(name: string) => Promise<ArrayBuffer>} fetched how its files are read: from a server, or in node from a folder
 * @returns {Promise<Bundle>}
 */
export async function openManifest(fetched) {
  const manifest = JSON.parse(new TextDecoder().decode(await fetched("manifest.json")));
  if (manifest.format !== "fedrecon-bundle" || manifest.version !== 2) {
    throw new Error(`this page reads bundles of version 2, not ${manifest.format} ${manifest.version}`);
  }
  return new Bundle(manifest, async (name) => {
    const data = await fetched(name);
    await compare(name, data, manifest.files[name]);
    return data;
  });
}

/**
 * Fail unless bytes have the digest that the manifest gives them.
 * @param {string} name
 * @param {ArrayBuffer} data
 * @param {{bytes: number, sha256: string} | undefined} about
 */
async function compare(name, data, about) {
  if (about === undefined || data.byteLength !== about.bytes) throw new Error(`${name} was changed`);
  if (globalThis.crypto?.subtle === undefined) return; // it exists only on pages served securely, or from this machine
  if ((await digestOf(data)) !== about.sha256) throw new Error(`${name} was changed: its digest is not the one in manifest.json`);
}

/**
 * Return the SHA-256 of bytes, in hex.
 * @param {ArrayBuffer} data
 */
export async function digestOf(data) {
  return toHex(new Uint8Array(await crypto.subtle.digest("SHA-256", data)));
}

/** @param {Uint8Array} bytes */
export function toHex(bytes) {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Decompress a file as zlib compressed it, up to a limit.
 * @param {string} name
 * @param {ArrayBuffer} data
 * @returns {Promise<Uint8Array>}
 */
export async function inflated(name, data) {
  const reader = new Blob([data]).stream().pipeThrough(new DecompressionStream("deflate")).getReader();
  const parts = [];
  let length = 0;
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    parts.push(part.value);
    length += part.value.length;
    if (length > MOST) {
      await reader.cancel();
      throw new Error(`${name} is larger than this page reads`);
    }
  }
  const whole = new Uint8Array(length);
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

/**
 * Read a safetensors file.
 * @param {ArrayBuffer} buffer
 * @returns {Map<string, {dtype: string, shape: number[], bytes: Uint8Array}>}
 */
export function readTensors(buffer) {
  const { header, length } = readHeader(buffer);
  const found = new Map();
  for (const [name, about] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const [from, to] = about.data_offsets;
    if (!(from >= 0 && to >= from && to <= buffer.byteLength - 8 - length)) throw new Error(`${name} is out of range`);
    found.set(name, {
      dtype: about.dtype,
      shape: about.shape,
      bytes: new Uint8Array(buffer.slice(8 + length + from, 8 + length + to)),
    });
  }
  return found;
}

/**
 * Return what a safetensors file says about itself.
 * @param {ArrayBuffer} buffer
 * @returns {Record<string, string>}
 */
export function readMetadata(buffer) {
  return readHeader(buffer).header.__metadata__ ?? {};
}

/** @param {ArrayBuffer} buffer @returns {{header: Record<string, any>, length: number}} */
function readHeader(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  if (length > buffer.byteLength - 8) throw new Error("the tables' header is longer than the file");
  return { header: JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length))), length };
}

/**
 * Return the tensors under a prefix as float32, by path.
 * @param {ReturnType<typeof readTensors>} tensors
 * @param {string} prefix
 * @returns {Map<string, Tensor>}
 */
export function underPrefix(tensors, prefix) {
  const found = new Map();
  for (const [name, { dtype, shape, bytes }] of tensors) {
    if (!name.startsWith(prefix)) continue;
    const path = name.slice(prefix.length);
    if (dtype === "F32") {
      found.set(path, { data: new Float32Array(bytes.buffer), shape });
    } else if (dtype === "F16") {
      found.set(path, { data: fromHalves(new Uint16Array(bytes.buffer)), shape });
    } else if (dtype === "I8") {
      const scale = tensors.get(`row_scale/${path}`);
      if (scale === undefined) throw new Error(`${name} has no scales`);
      const scales = scale.dtype === "F16" ? fromHalves(new Uint16Array(scale.bytes.buffer)) : new Float32Array(scale.bytes.buffer);
      found.set(path, { data: fromBytes(new Int8Array(bytes.buffer), scales), shape });
    } else {
      throw new Error(`${name} is of type ${dtype}, which this page does not read`);
    }
  }
  return found;
}

/**
 * @param {Int8Array} values
 * @param {Float32Array} scale one per row
 */
function fromBytes(values, scale) {
  const width = values.length / scale.length;
  return Float32Array.from(values, (value, k) => value * scale[Math.floor(k / width)]);
}

/** @param {Uint16Array} halves */
function fromHalves(halves) {
  return Float32Array.from(halves, (half) => {
    const sign = half & 0x8000 ? -1 : 1;
    const exponent = (half >> 10) & 31;
    const rest = half & 1023;
    if (exponent === 0) return sign * rest * 2 ** -24;
    if (exponent === 31) return rest ? NaN : sign * Infinity;
    return sign * (1 + rest / 1024) * 2 ** (exponent - 15);
  });
}
