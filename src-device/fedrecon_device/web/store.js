// All that the page keeps: one entry of this browser's storage for this page, which one button deletes.
// @ts-check

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

/**
 * Return the examples that are kept; none if there is nothing, or nothing that can be read.
 * @template T
 * @param {(example: any) => example is T} valid
 * @returns {T[]}
 */
export function kept(valid) {
  try {
    const found = JSON.parse(text() ?? "null");
    return found?.version === 1 && Array.isArray(found.examples) ? found.examples.filter(valid) : [];
  } catch {
    return [];
  }
}

/**
 * Keep examples; if the browser's storage takes none, until the page is closed.
 * @param {unknown[]} examples
 */
export function keep(examples) {
  const content = JSON.stringify({ version: 1, examples });
  try {
    localStorage.setItem(KEY, content);
    unstored = null;
  } catch {
    unstored = content; // full, or switched off
  }
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
