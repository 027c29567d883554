// Small parts of the page: elements, stars to rate with, and what a screen reader is told.
// @ts-check

/**
 * Return an element of the page.
 * @param {string} id
 * @returns {HTMLElement}
 */
export function at(id) {
  return /** @type {HTMLElement} */ (document.getElementById(id));
}

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
 * Return a count with its noun.
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
  at("said").textContent = sentence;
}

/**
 * Make the control for a rating: stars if the scale has few steps, else a field for a number.
 * @param {string} name a unique name
 * @param {string} label what is rated
 * @param {[number, number] | null} scale
 * @param {number | null} chosen
 * @param {(rating: number) => void} onChoose
 * @param {boolean} [counts] whether it is a count, which may be higher than any so far
 */
export function rater(name, label, scale, chosen, onChoose, counts = false) {
  const few = scale !== null && Number.isInteger(scale[1]) && scale[1] <= 10 && scale[0] > 0;
  if (few && !counts) return stars(name, label, scale[1], chosen, onChoose);
  return numberField(name, label, counts ? [0, Infinity] : (scale ?? [-Infinity, Infinity]), chosen, onChoose);
}

/**
 * Make radio buttons for a rating of 1 to `most` stars.
 * @param {string} name
 * @param {string} label
 * @param {number} most
 * @param {number | null} chosen
 * @param {(rating: number) => void} onChoose
 */
function stars(name, label, most, chosen, onChoose) {
  const group = element("fieldset", { class: "stars" });
  group.append(element("legend", { class: "hidden", text: `Your rating of ${label}` }));
  for (let value = 1; value <= most; value++) {
    const input = /** @type {HTMLInputElement} */ (
      element("input", { type: "radio", name, id: `${name}-${value}`, value: String(value) })
    );
    input.checked = chosen !== null && Math.abs(chosen - value) < 1e-6;
    input.addEventListener("change", () => onChoose(value));
    const text = element("label", { for: `${name}-${value}` });
    const drawn = element("span", { class: "star", text: "★" });
    drawn.setAttribute("aria-hidden", "true");
    text.append(drawn, element("span", { class: "hidden", text: `${value} of ${most}` }));
    if (chosen !== null && value <= chosen + 1e-6) text.classList.add("lit");
    group.append(input, text);
  }
  return group;
}

/**
 * Make a field for a rating that is any number between two.
 * @param {string} name
 * @param {string} label
 * @param {[number, number]} scale
 * @param {number | null} chosen
 * @param {(rating: number) => void} onChoose
 */
function numberField(name, label, [low, high], chosen, onChoose) {
  const input = /** @type {HTMLInputElement} */ (
    element("input", { type: "number", id: name, step: "any", inputmode: "decimal", class: "amount" })
  );
  if (Number.isFinite(low)) input.min = String(low);
  if (Number.isFinite(high)) input.max = String(high);
  if (chosen !== null) input.value = String(chosen);
  input.setAttribute("aria-label", `Your number for ${label}`);
  input.addEventListener("change", () => {
    const value = input.valueAsNumber;
    if (!input.reportValidity() || !Number.isFinite(value)) return;
    onChoose(value);
  });
  return input;
}

/**
 * Make a checkbox for an item that the person has.
 * @param {string} name
 * @param {string} label
 * @param {boolean} chosen
 * @param {(has: boolean) => void} onChoose
 */
export function picker(name, label, chosen, onChoose) {
  const whole = element("label", { class: "pick", for: name });
  const input = /** @type {HTMLInputElement} */ (element("input", { type: "checkbox", id: name }));
  input.checked = chosen;
  input.setAttribute("aria-label", `I have ${label}`);
  input.addEventListener("change", () => onChoose(input.checked));
  whole.append(input);
  return whole;
}

/**
 * Write a predicted rating: counts of ten and more without decimals.
 * @param {number} rating
 * @param {boolean} counts
 */
export function written(rating, counts) {
  return counts && rating >= 9.95 ? Math.round(rating).toLocaleString("en") : rating.toFixed(1);
}

/**
 * Replace the children of a list, and keep the focus on the element with the same id.
 * @param {HTMLElement} list
 * @param {HTMLElement[]} children
 */
export function refill(list, children) {
  const focused = list.contains(document.activeElement) ? document.activeElement?.id : "";
  list.replaceChildren(...children);
  if (focused) document.getElementById(focused)?.focus();
}
