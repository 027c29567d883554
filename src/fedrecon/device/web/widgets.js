// Small parts of the page: elements, stars to rate with, and what a screen reader is told.
// @ts-check

/**
 * Make an element.
 * @param {string} name
 * @param {Record<string, string>} attributes `text` is its text
 * @returns {HTMLElement}
 */
export function element(name, { text, ...attributes }) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/**
 * Return a number of things.
 * @param {number} count
 * @param {string} thing
 */
export function counted(count, thing) {
  return count === 1 ? `1 ${thing}` : `${count} ${thing}s`;
}

/**
 * Tell a screen reader something.
 * @param {string} sentence
 */
export function say(sentence) {
  /** @type {HTMLElement} */ (document.getElementById("said")).textContent = sentence;
}

/**
 * Make radio buttons for a rating, drawn as stars.
 * @param {string} name that no other group has
 * @param {string} label what is rated
 * @param {[number, number] | null} scale
 * @param {number | null} chosen
 * @param {(rating: number) => void} onChoose
 */
export function stars(name, label, scale, chosen, onChoose) {
  const [low, high] = scale ?? [1, 5];
  const steps = Number.isInteger(high) && high <= 10 && low > 0 ? high : 5;
  const group = element("fieldset", { class: "stars" });
  group.append(element("legend", { class: "hidden", text: `Your rating of ${label}` }));
  for (let k = 1; k <= steps; k++) {
    const value = steps === high ? k : low + ((high - low) * (k - 1)) / (steps - 1);
    const input = /** @type {HTMLInputElement} */ (
      element("input", { type: "radio", name, id: `${name}-${k}`, value: String(value) })
    );
    input.checked = chosen !== null && Math.abs(chosen - value) < 1e-6;
    input.addEventListener("change", () => onChoose(value));
    const text = element("label", { for: `${name}-${k}` });
    const drawn = element("span", { class: "star", text: "★" });
    drawn.setAttribute("aria-hidden", "true");
    text.append(drawn, element("span", { class: "hidden", text: `${value} of ${high}` }));
    if (chosen !== null && value <= chosen + 1e-6) text.classList.add("lit");
    group.append(input, text);
  }
  group.addEventListener("change", () => light(group));
  return group;
}

/** @param {HTMLElement} group */
function light(group) {
  let lit = false;
  for (const input of Array.from(group.querySelectorAll("input")).reverse()) {
    lit ||= input.checked;
    input.nextElementSibling?.classList.toggle("lit", lit);
  }
}
