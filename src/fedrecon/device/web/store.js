// All that the page keeps: one entry of this browser's storage for this page, which one button deletes.
// @ts-check

const KEY = `fedrecon:${globalThis.location?.pathname ?? ""}`;

/**
 * Return what is kept; the given value if there is nothing, or nothing that can be read.
 * @template T
 * @param {T} otherwise
 * @returns {T}
 */
export function kept(otherwise) {
  try {
    const found = JSON.parse(localStorage.getItem(KEY) ?? "null");
    return found?.version === 1 ? found.examples : otherwise;
  } catch {
    return otherwise;
  }
}

/**
 * Keep examples.
 * @param {unknown} examples
 */
export function keep(examples) {
  localStorage.setItem(KEY, JSON.stringify({ version: 1, examples }));
}

/** Forget all of it. */
export function forget() {
  localStorage.removeItem(KEY);
}

/** How many bytes are kept. */
export function size() {
  return new TextEncoder().encode(localStorage.getItem(KEY) ?? "").length;
}
