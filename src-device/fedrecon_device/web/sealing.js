// What a device does to a vector before it leaves: noise, mask, the seed of the mask sealed for the helper, bytes.
// @ts-check

/**
 * @typedef {Object} Purpose what a report is for; the helper opens it for nothing else
 * @property {Uint8Array} plan the plan's digest, 32 bytes
 * @property {string} run
 * @property {number} round
 * @property {Uint8Array} batch 16 bytes
 * @typedef {{id: Uint8Array, seed: Uint8Array, pair: CryptoKeyPair}} Secrets drawn for one report
 */

const INFO = new TextEncoder().encode("fedrecon two servers v1");
const MOST_RANDOM = 1 << 16; // bytes that browsers give at once

/**
 * Return what to add to a vector so that it looks random: the keystream of AES-256-CTR, one word for each entry.
 * @param {Uint8Array} seed 32 bytes
 * @param {number} length
 * @returns {Promise<Uint32Array>}
 */
export async function expandMask(seed, length) {
  const key = await crypto.subtle.importKey("raw", buffer(seed), "AES-CTR", false, ["encrypt"]);
  const counter = { name: "AES-CTR", counter: new Uint8Array(16), length: 64 };
  return new Uint32Array(await crypto.subtle.encrypt(counter, key, new Uint8Array(4 * length)));
}

/**
 * Pack the lowest bits of every entry, little-endian: 4 bytes, 3 bytes, or 5 bytes for two entries.
 * @param {Uint32Array} vector
 * @param {number} bits 32, 24 or 20
 * @returns {Uint8Array}
 */
export function packVector(vector, bits) {
  if (bits === 32) return new Uint8Array(vector.slice().buffer);
  if (bits !== 24 && bits !== 20) throw new Error(`bits must be 32, 24 or 20 (got ${bits})`);
  const bytes = new Uint8Array(bits === 24 ? 3 * vector.length : 5 * Math.ceil(vector.length / 2));
  if (bits === 24) {
    for (let k = 0, at = 0; k < vector.length; k++) {
      bytes[at++] = vector[k];
      bytes[at++] = vector[k] >>> 8;
      bytes[at++] = vector[k] >>> 16;
    }
    return bytes;
  }
  for (let k = 0, at = 0; k < vector.length; k += 2) {
    const low = vector[k] & 0xfffff, high = (vector[k + 1] ?? 0) & 0xfffff;
    bytes[at++] = low;
    bytes[at++] = low >>> 8;
    bytes[at++] = (low >>> 16) | (high << 4);
    bytes[at++] = high >>> 4;
    bytes[at++] = high >>> 12;
  }
  return bytes;
}

/**
 * Return the bytes of a report for two servers: its id, the sealed seed of its mask, the masked vector.
 * @param {Uint32Array} vector
 * @param {number} bits
 * @param {Uint8Array} helper the helper's public key
 * @param {Purpose} purpose
 * @param {Secrets} [secrets] for tests; drawn by default
 * @returns {Promise<Uint8Array>}
 */
export async function sealReport(vector, bits, helper, purpose, secrets) {
  const { id, seed, pair } = secrets ?? (await drawSecrets());
  const masked = await expandMask(seed, vector.length);
  for (let k = 0; k < masked.length; k++) masked[k] += vector[k]; // modulo 2**32; packing keeps the lowest bits
  const { plan, run, round, batch } = purpose;
  const runDigest = new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(run)));
  const about = join(plan, runDigest, batch, bigEndian(round), id, bigEndian(vector.length));
  return join(id, await seal(seed, helper, about, pair), packVector(masked, bits));
}

/** @returns {Promise<Secrets>} */
async function drawSecrets() {
  const pair = /** @type {CryptoKeyPair} */ (await crypto.subtle.generateKey({ name: "X25519" }, false, ["deriveBits"]));
  return { id: crypto.getRandomValues(new Uint8Array(16)), seed: crypto.getRandomValues(new Uint8Array(32)), pair };
}

/**
 * Encrypt a seed so that only the helper can read it, and only together with what it is for.
 * @param {Uint8Array} seed
 * @param {Uint8Array} helper
 * @param {Uint8Array} about
 * @param {CryptoKeyPair} pair used once, so the nonce may be zero
 */
async function seal(seed, helper, about, pair) {
  const subtle = crypto.subtle;
  const ephemeral = new Uint8Array(await subtle.exportKey("raw", pair.publicKey));
  const recipient = await subtle.importKey("raw", buffer(helper), { name: "X25519" }, false, []);
  const shared = await subtle.deriveBits({ name: "X25519", public: recipient }, pair.privateKey, 256);
  const secret = await subtle.importKey("raw", shared, "HKDF", false, ["deriveKey"]);
  const derivation = { name: "HKDF", hash: "SHA-256", salt: buffer(join(ephemeral, helper)), info: INFO };
  const key = await subtle.deriveKey(derivation, secret, { name: "AES-GCM", length: 256 }, false, ["encrypt"]);
  const nonce = { name: "AES-GCM", iv: new Uint8Array(12), additionalData: buffer(about) };
  return join(ephemeral, new Uint8Array(await subtle.encrypt(nonce, key, buffer(seed))));
}

/**
 * Add a share of Skellam noise to a vector, drawn from the system's entropy.
 * @param {Uint32Array} vector changed in place, modulo 2**32
 * @param {number} variance of each entry
 * @param {() => number} [uniform] for tests
 */
export function addNoise(vector, variance, uniform = systemUniform()) {
  const draw = poisson(variance / 2, uniform);
  for (let k = 0; k < vector.length; k++) vector[k] += draw() - draw();
}

/**
 * Return a function that draws from a Poisson distribution.
 *
 * Small rates multiply uniforms (Knuth); large ones use transformed rejection (Hörmann, "The transformed rejection
 * method for generating Poisson random variables", 1993).
 * @param {number} rate
 * @param {() => number} uniform between 0 and 1
 */
export function poisson(rate, uniform) {
  if (rate < 10) {
    const limit = Math.exp(-rate);
    return () => {
      let count = 0;
      for (let product = uniform(); product > limit; product *= uniform()) count++;
      return count;
    };
  }
  const logRate = Math.log(rate), b = 0.931 + 2.53 * Math.sqrt(rate), a = -0.059 + 0.02483 * b;
  const accepted = 1.1239 + 1.1328 / (b - 3.4), squeeze = 0.9277 - 3.6224 / (b - 2);
  return () => {
    for (;;) {
      const u = uniform() - 0.5, v = uniform(), distance = 0.5 - Math.abs(u);
      const count = Math.floor(((2 * a) / distance + b) * u + rate + 0.43);
      if (distance >= 0.07 && v <= squeeze) return count;
      if (count < 0 || (distance < 0.013 && v > distance)) continue;
      const height = Math.log(v) + Math.log(accepted) - Math.log(a / (distance * distance) + b);
      if (height <= -rate + count * logRate - logFactorial(count)) return count;
    }
  };
}

/** @param {number} n */
function logFactorial(n) {
  if (n < 2) return 0;
  if (n < 16) {
    let product = 1;
    for (let k = 2; k <= n; k++) product *= k;
    return Math.log(product);
  }
  return (n + 0.5) * Math.log(n) - n + 0.5 * Math.log(2 * Math.PI) + 1 / (12 * n) - 1 / (360 * n ** 3) + 1 / (1260 * n ** 5);
}

/** Return a function that draws numbers between 0 and 1, both excluded, from the system's entropy. */
export function systemUniform() {
  const words = new Uint32Array(MOST_RANDOM / 4);
  let used = words.length;
  return () => {
    if (used + 2 > words.length) {
      crypto.getRandomValues(words);
      used = 0;
    }
    const high = words[used++] >>> 6, low = words[used++] >>> 6; // 52 bits
    return (high * 2 ** 26 + low + 0.5) / 2 ** 52;
  };
}

/** @param {number} n @returns {Uint8Array} 8 bytes */
function bigEndian(n) {
  const bytes = new Uint8Array(8);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(n));
  return bytes;
}

/** @param {Uint8Array[]} parts */
function join(...parts) {
  const whole = new Uint8Array(parts.reduce((length, part) => length + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

/** @param {Uint8Array} bytes @returns {Uint8Array<ArrayBuffer>} the same for TypeScript, whose arrays may be shared */
function buffer(bytes) {
  return /** @type {Uint8Array<ArrayBuffer>} */ (bytes);
}
