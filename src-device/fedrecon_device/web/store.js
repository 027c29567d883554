// All that the page keeps: one entry of this browser's storage for this page, which one button deletes.
// @ts-check

/** @typedef {import("./participant.js").ParticipantRecord} ParticipantRecord */

const KEY = `fedrecon:${globalThis.location?.pathname ?? ""}`;

/** @type {string | null} what this browser refused to store, kept while the page is open */
let unstored = null;

/** @returns {string | null} */
function text() {
  if (unstored !== null) return unstored;
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage is switched off
  }
}

/** @returns {{examples: unknown[], participation: ParticipantRecord | null}} what is kept, as far as it can be read */
function read() {
  try {
    const { version, examples, participation } = JSON.parse(text() ?? "null") ?? {};
    if (version === 1 && Array.isArray(examples)) return { examples, participation: participation ?? null };
  } catch {
    // somebody else wrote it
  }
  return { examples: [], participation: null };
}

/** @param {ReturnType<typeof read>} entry kept until the page is closed if the browser's storage takes nothing */
function write({ examples, participation }) {
  const content = JSON.stringify({ version: 1, examples, ...(participation === null ? {} : { participation }) });
  try {
    localStorage.setItem(KEY, content);
    unstored = null;
  } catch {
    unstored = content; // full, or switched off
  }
}

/**
 * Return the examples that are kept; none if there is nothing, or nothing that can be read.
 * @template T
 * @param {(example: any) => example is T} valid
 * @returns {T[]}
 */
export function kept(valid) {
  return read().examples.filter(valid);
}

/**
 * Keep examples.
 * @param {unknown[]} examples
 */
export function keep(examples) {
  write({ ...read(), examples });
}

/** Return what taking part in training keeps; null if the person does not take part. */
export function participation() {
  return read().participation;
}

/**
 * Keep what taking part in training keeps.
 * @param {ParticipantRecord | null} record null to take no part, and to keep nothing of it
 */
export function keepParticipation(record) {
  write({ ...read(), participation: record });
}

/** Whether what was entered last is kept only until the page is closed. */
export function isTemporary() {
  return unstored !== null;
}

/** Forget all of it. */
export function forget() {
  unstored = null;
  try {
    localStorage.removeItem(KEY);
  } catch {
    // nothing to delete
  }
}

/** How many bytes are kept. */
export function size() {
  return new TextEncoder().encode(text() ?? "").length;
}
