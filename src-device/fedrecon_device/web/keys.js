// Random draws of a device, the same as in training: Threefry-2x32, hashes of names, redrawn orders.
// @ts-check

/** @typedef {[number, number]} Key two words of 32 bits */

const ROTATIONS = [[13, 15, 26, 6], [17, 29, 16, 24]];
const NAME_SALT = 0x632be59bd9b4e019n;
const MASK = (1n << 64n) - 1n;

/**
 * Return the words of one block of Threefry-2x32 with 20 rounds.
 * @param {Key} key
 * @param {Key} count
 * @returns {Key}
 */
export function threefry([k0, k1], [c0, c1]) {
  const keys = [k0, k1, (k0 ^ k1 ^ 0x1bd11bda) >>> 0];
  let a = (c0 + k0) >>> 0, b = (c1 + k1) >>> 0;
  for (let group = 0; group < 5; group++) {
    for (const rotation of ROTATIONS[group % 2]) {
      a = (a + b) >>> 0;
      b = (a ^ ((b << rotation) | (b >>> (32 - rotation)))) >>> 0;
    }
    a = (a + keys[(group + 1) % 3]) >>> 0;
    b = (b + keys[(group + 2) % 3] + group + 1) >>> 0;
  }
  return [a, b];
}

/**
 * Return what `jax.random.fold_in` returns.
 * @param {Key} key
 * @param {number} n
 * @returns {Key}
 */
export function foldIn(key, n) {
  return threefry(key, [0, n >>> 0]);
}

/**
 * Hash a 64-bit number with a salt: the mixer of SplitMix64.
 * @param {bigint} number
 * @param {bigint} salt
 */
export function mixHash(number, salt) {
  let x = (number * 0x9e3779b97f4a7c15n + salt) & MASK;
  x = ((x ^ (x >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  x = ((x ^ (x >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return x ^ (x >> 31n);
}

/**
 * Return the 64-bit hash of a name.
 * @param {string} name
 */
export function nameHash(name) {
  let hash = 0n;
  for (const character of name.replaceAll("\0", "")) hash = mixHash(hash ^ BigInt(character.codePointAt(0) ?? 0), NAME_SALT);
  return hash;
}

/**
 * Return a client's key of a round.
 * @param {Key} roundKey
 * @param {string} name
 * @returns {Key}
 */
export function clientKey(roundKey, name) {
  const hash = nameHash(name);
  return foldIn(foldIn(roundKey, Number(hash >> 32n)), Number(hash & 0xffffffffn));
}

/**
 * Return the order in which a redrawn split takes a client's examples.
 * @param {Key} roundKey
 * @param {string} name
 * @param {number} size how many examples
 * @returns {number[]}
 */
export function redrawnOrder([high, low], name, size) {
  const salt = mixHash(nameHash(name), (BigInt(high) << 32n) | BigInt(low));
  const hashes = Array.from({ length: size }, (_, k) => mixHash(BigInt(k), salt));
  return hashes.map((_, k) => k).sort((a, b) => (hashes[a] < hashes[b] ? -1 : hashes[a] > hashes[b] ? 1 : a - b));
}
