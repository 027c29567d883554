// Text: sentences, words, their ids and suggestions, exactly as in training.
// @ts-check

const URL_WORD = "<URL>";
// What Python calls white space, and where it ends a line; JavaScript's own classes differ in a few controls.
const SPACE = "\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
const LINE_END = /\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]/u;
const MARKS =
  "!-/:-@\\[-^`\\{-~\\xa1-\\xa9\\xab-\\xb4\\xb6-\\xb9\\xbb-\\xbf\\xd7\\xf7\\u2010-\\u2027\\u2030-\\u205e\\u20a0-\\u20cf" +
  "\\u2100-\\u2bff\\u2e00-\\u2e7f\\u3001-\\u3004\\u3008-\\u3020\\u3030\\ufe10-\\ufe19\\ufe30-\\ufe6f\\uff01-\\uff0f" +
  "\\uff1a-\\uff20\\uff3b-\\uff40\\uff5b-\\uff65\\ufffc\\ufffd\\u{1f000}-\\u{1faff}";
const LETTERS = `[^${SPACE}${MARKS}]+`;
const WORD = new RegExp(`${URL_WORD}|${LETTERS}(?:['\\-]${LETTERS})*|\\.\\.\\.|[${MARKS}]`, "gu");
const DOTS = /\.{2,}|…/gu;
const REPEATED = new RegExp(`([${MARKS}])(?<!\\.)\\1+`, "gu");
const WEB = new RegExp(`(?:https?://|www\\.)[^${SPACE}]*[^${SPACE}.,;:!?"')\\]>]`, "gu");
const END = new RegExp(`([.!?]["')\\]]*)(?!(?<=\\.\\.\\.)[${SPACE}]+[a-z])[${SPACE}]+`, "gu");
const INVISIBLE =
  /[\x00-\x08\x0e-\x1b\x7f\x80-\x84\x86-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]/gu;
/** @type {Record<string, string>} */
const STRAIGHT = { "‘": "'", "’": "'", "‛": "'", "ʼ": "'", "“": '"', "”": '"', "„": '"', "‟": '"' };

/**
 * Split text into sentences, and those into words in lower case; sentences without words are left out.
 * @param {string} text
 * @returns {string[][]}
 */
export function splitText(text) {
  const plain = text
    .replace(INVISIBLE, "")
    .normalize("NFC")
    .replace(/[‘’‛ʼ“”„‟]/gu, (mark) => STRAIGHT[mark])
    .replace(DOTS, "...")
    .replace(END, "$1\n")
    .toLowerCase()
    .replace(WEB, ` ${URL_WORD} `)
    .replace(REPEATED, " $1 ");
  return plain
    .split(LINE_END)
    .map((line) => line.match(WORD) ?? [])
    .filter((words) => words.length > 0);
}

/**
 * Return 31 bits that depend on the word alone: BLAKE2b of 4 bytes.
 * @param {string} word
 */
export function wordHash(word) {
  const digest = blake2b(new TextEncoder().encode(word), 4);
  return (digest[0] + digest[1] * 2 ** 8 + digest[2] * 2 ** 16 + digest[3] * 2 ** 24) % 2 ** 31;
}

const MASK = (1n << 64n) - 1n;
const INITIAL = [
  0x6a09e667f3bcc908n, 0xbb67ae8584caa73bn, 0x3c6ef372fe94f82bn, 0xa54ff53a5f1d36f1n,
  0x510e527fade682d1n, 0x9b05688c2b3e6c1fn, 0x1f83d9abfb41bd6bn, 0x5be0cd19137e2179n,
];
const ORDER = [
  [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
  [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
  [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
  [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
  [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
  [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
  [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
  [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
  [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
  [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
];
const LANES = [
  [0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15],
  [0, 5, 10, 15], [1, 6, 11, 12], [2, 7, 8, 13], [3, 4, 9, 14],
];

/**
 * BLAKE2b without a key (RFC 7693).
 * @param {Uint8Array} data
 * @param {number} length of the digest
 * @returns {Uint8Array}
 */
export function blake2b(data, length) {
  const state = [...INITIAL];
  state[0] ^= 0x01010000n ^ BigInt(length);
  const blocks = Math.max(1, Math.ceil(data.length / 128));
  for (let block = 0; block < blocks; block++) {
    const bytes = new Uint8Array(128);
    bytes.set(data.subarray(block * 128, block * 128 + 128));
    const done = Math.min(data.length, block * 128 + 128);
    mix(state, new DataView(bytes.buffer), BigInt(done), block === blocks - 1);
  }
  const out = new DataView(new ArrayBuffer(64));
  state.forEach((word, k) => out.setBigUint64(8 * k, word, true));
  return new Uint8Array(out.buffer, 0, length);
}

/**
 * @param {bigint[]} state
 * @param {DataView} block
 * @param {bigint} done
 * @param {boolean} last
 */
function mix(state, block, done, last) {
  const v = [...state, ...INITIAL];
  v[12] ^= done;
  if (last) v[14] ^= MASK;
  const words = Array.from({ length: 16 }, (_, k) => block.getBigUint64(8 * k, true));
  /** @param {bigint} x @param {bigint} by */
  const turned = (x, by) => ((x >> by) | (x << (64n - by))) & MASK;
  for (let round = 0; round < 12; round++) {
    const order = ORDER[round % 10];
    LANES.forEach(([a, b, c, d], k) => {
      v[a] = (v[a] + v[b] + words[order[2 * k]]) & MASK;
      v[d] = turned(v[d] ^ v[a], 32n);
      v[c] = (v[c] + v[d]) & MASK;
      v[b] = turned(v[b] ^ v[c], 24n);
      v[a] = (v[a] + v[b] + words[order[2 * k + 1]]) & MASK;
      v[d] = turned(v[d] ^ v[a], 16n);
      v[c] = (v[c] + v[d]) & MASK;
      v[b] = turned(v[b] ^ v[c], 63n);
    });
  }
  for (let k = 0; k < 8; k++) state[k] ^= v[k] ^ v[k + 8];
}

/**
 * @typedef {{word: string, probability: number, personal: boolean}} Suggestion
 * @typedef {{word: Int32Array, oov: Int32Array, pair: Int32Array, target: Int32Array}} Columns each (sentences * words per sentence)
 */

/** The words that a model knows, the buckets for all others, and what a sentence looks like to it. */
export class Vocabulary {
  /** @param {{words: string[], buckets: number, max_words: number}} content */
  constructor({ words, buckets, max_words: maxWords }) {
    this.words = words;
    this.buckets = buckets;
    this.maxWords = maxWords;
    this.ids = new Map(words.map((word, k) => [word, k + 1]));
    this.bos = words.length + 1;
    this.eos = words.length + 2;
    this.firstOov = words.length + 3;
  }

  /** @param {string} word */
  bucket(word) {
    return wordHash(word) % this.buckets;
  }

  /** @param {string} word */
  idOf(word) {
    return this.ids.get(word) ?? this.firstOov + this.bucket(word);
  }

  /**
   * Return sentences as columns.
   * @param {string[][]} sentences
   * @param {number} [rows] how many rows the columns have; the rest is padding
   * @returns {Columns}
   */
  columns(sentences, rows = sentences.length) {
    return this.split(
      sentences.map((sentence) =>
        [this.bos, ...sentence.slice(0, this.maxWords).map((word) => this.idOf(word)), this.eos].slice(
          0,
          this.maxWords + 1,
        ),
      ),
      rows,
    );
  }

  /**
   * Return the beginning of a sentence as columns, and its words that are read.
   * @param {string[]} all
   * @returns {{columns: Columns, words: string[]}}
   */
  prompt(all) {
    const words = all.slice(Math.max(0, all.length - this.maxWords + 1));
    const columns = this.split([[this.bos, ...words.map((word) => this.idOf(word))]], 1);
    return { columns, words };
  }

  /**
   * @param {number[][]} ids
   * @param {number} rows
   * @returns {Columns}
   */
  split(ids, rows) {
    const length = rows * this.maxWords;
    const [word, oov, pair, target] = [0, 1, 2, 3].map(() => new Int32Array(length));
    ids.forEach((row, r) => {
      for (let t = 0; t < this.maxWords; t++) {
        const now = row[t] ?? 0;
        const at = r * this.maxWords + t;
        word[at] = now <= this.eos ? now : 0;
        oov[at] = now <= this.eos ? 0 : now - this.eos;
        pair[at] = now === 0 ? 0 : ((row[t - 1] ?? 0) * PAIR_FACTOR + now) % PAIR_ROWS;
        target[at] = row[t + 1] ?? 0;
      }
    });
    return { word, oov, pair, target };
  }
}

const PAIR_ROWS = 32749, PAIR_FACTOR = 1000003;
const DISCOUNT = 0.7, BIGRAM_WEIGHT = 200, TRIGRAM_WEIGHT = 5;
const PRIOR = 5, HALF_LIFE = 100;
const LEAST_OWN = 0.01, RESERVED_FROM = 5;

/** What one person's sentences say about their next words, on top of a model's: own and recent words, n-grams. */
export class PersonalWords {
  /** @param {Vocabulary} vocabulary */
  constructor(vocabulary) {
    this.vocabulary = vocabulary;
    /** @type {Map<string, number>} the person's own words, outside the vocabulary, with their places */
    this.own = new Map();
    /** @type {number[]} how often each of them was used */
    this.uses = [];
    /** how often each id was used, all words outside the vocabulary last; and lately */
    this.count = new Float64Array(vocabulary.firstOov + 1);
    this.recent = new Float64Array(vocabulary.firstOov + 1);
    /** @type {Map<string, Map<number, number>>} by context, how often each word followed */
    this.followers = new Map();
  }

  /**
   * Learn a sentence.
   * @param {string[]} sentence
   */
  learn(sentence) {
    const words = sentence.slice(0, this.vocabulary.maxWords);
    for (const word of words) {
      if (this.vocabulary.ids.has(word)) continue;
      const place = this.own.get(word) ?? this.own.size;
      this.own.set(word, place);
      this.uses[place] = (this.uses[place] ?? 0) + 1;
    }
    const ids = [...this.inputs(words), this.vocabulary.eos].slice(0, this.vocabulary.maxWords + 1);
    const fade = 0.5 ** ((ids.length - 1) / HALF_LIFE);
    for (let k = 0; k < this.recent.length; k++) this.recent[k] *= fade;
    for (let t = 1; t < ids.length; t++) {
      const id = Math.min(ids[t], this.vocabulary.firstOov);
      this.count[id]++;
      this.recent[id]++;
      for (const context of [`${ids[t - 1]}`, `${ids[t - 2] ?? -1} ${ids[t - 1]}`]) {
        const followers = this.followers.get(context) ?? new Map();
        this.followers.set(context, followers.set(ids[t], (followers.get(ids[t]) ?? 0) + 1));
      }
    }
  }

  /**
   * Return the ids of a sentence's beginning and words; -1 for words that the person has not used.
   * @param {string[]} words
   * @returns {number[]}
   */
  inputs(words) {
    const { ids, bos, firstOov } = this.vocabulary;
    return [bos, ...words.map((word) => ids.get(word) ?? (this.own.has(word) ? firstOov + (this.own.get(word) ?? 0) : -1))];
  }

  /**
   * Return the most probable next words; of five or more, the last is kept for a word of the person's own.
   * @param {ArrayLike<number>} logits of everything that may come next, for this person
   * @param {string[]} words the beginning of the sentence
   * @param {number} n
   * @param {string} [prefix] the letters of the next word that are typed already
   * @returns {Suggestion[]}
   */
  suggest(logits, words, n, prefix = "") {
    const { firstOov } = this.vocabulary;
    let highest = -Infinity;
    for (let k = 0; k < logits.length; k++) highest = Math.max(highest, logits[k]);
    const [usedLately, usedEver] = [this.recent, this.count].map((counts) => counts.reduce((sum, count) => sum + count, 0));
    const lately = usedLately / Math.max(usedEver, 1);
    // Above 1 for what the person writes about now.
    const ratio = this.recent.map((count, k) => (count + PRIOR) / (this.count[k] * lately + PRIOR));
    const exponentials = Array.from(logits, (logit, k) => Math.exp(logit - highest) * ratio[Math.min(k, firstOov)]);
    const total = exponentials.reduce((sum, share) => sum + share, 0);
    const shares = exponentials.slice(0, firstOov).map((share) => share / total);
    const outside = exponentials.slice(firstOov).reduce((sum, share) => sum + share, 0) / total;
    const used = this.uses.reduce((sum, count) => sum + count, 0);
    for (const count of this.uses) shares.push((outside * (count - DISCOUNT)) / (used + 1));
    const [before, last] = [-1, ...this.inputs(words)].slice(-2);
    for (const [context, weight] of /** @type {const} */ ([[`${last}`, BIGRAM_WEIGHT], [`${before} ${last}`, TRIGRAM_WEIGHT]])) {
      const followers = this.followers.get(context);
      if (followers === undefined) continue;
      const seen = [...followers.values()].reduce((sum, count) => sum + count, 0);
      const scale = (weight + DISCOUNT * followers.size) / (seen + weight);
      for (let k = 0; k < shares.length; k++) shares[k] *= scale;
      for (const [target, count] of followers) shares[target] += (count - DISCOUNT) / (seen + weight);
    }
    /** @type {Suggestion[]} */
    const found = [];
    this.vocabulary.words.forEach((word, k) => {
      if (word.startsWith(prefix)) found.push({ word, probability: shares[k + 1], personal: false });
    });
    for (const [word, place] of this.own) {
      if (word.startsWith(prefix)) found.push({ word, probability: shares[firstOov + place], personal: true });
    }
    found.sort((a, b) => b.probability - a.probability || byCodePoints(a.word, b.word));
    const likeliest = found.findIndex((one) => one.personal);
    if (n >= RESERVED_FROM && likeliest >= n && found[likeliest].probability >= LEAST_OWN) {
      return [...found.slice(0, n - 1), found[likeliest]];
    }
    return found.slice(0, n);
  }
}

/**
 * Compare texts by code points, as Python does.
 * @param {string} a
 * @param {string} b
 */
function byCodePoints(a, b) {
  const left = Array.from(a), right = Array.from(b);
  for (let k = 0; k < Math.min(left.length, right.length); k++) {
    const difference = /** @type {number} */ (left[k].codePointAt(0)) - /** @type {number} */ (right[k].codePointAt(0));
    if (difference !== 0) return difference;
  }
  return left.length - right.length;
}
