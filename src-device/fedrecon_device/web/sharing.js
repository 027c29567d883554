// The switch with which a person takes part in training: off until they turn it on, and all that was sent below it.
// @ts-check

import { emptyRecord, randomName, sleep } from "./participant.js";
import { readPlan } from "./plan.js";
import * as store from "./store.js";
import { at, element, say } from "./widgets.js";

/**
 * @typedef {import("./background.js").FromWorker} FromWorker
 * @typedef {import("./participant.js").SentReport} SentReport
 * @typedef {import("./participant.js").Step} Step
 * @typedef {import("./plan.js").Plan} Plan
 */

const SHOWN = 20, AGAIN = 10, LONGEST = 3600; // reports; seconds after a first problem, and after many
const STATES = {
  reported: "Sent. Waiting for the next round.",
  told: "Waiting for the next round.",
  "few examples": "Waiting: there is too little to learn from yet.",
  "often enough": "Enough for today.",
};
const CHANGED = "The terms have changed since you agreed to them, so this is off until you agree to these. ";

/**
 * Show the switch, and take part while it is on.
 * @param {import("./bundle.js").Bundle} bundle
 * @param {() => import("./training.js").Columns} columns the person's examples
 * @param {() => void} onChange
 */
export async function showSharing(bundle, columns, onChange) {
  const plan = readPlan(new TextDecoder().decode(await bundle.read("plan.json")));
  const digest = bundle.manifest.files["plan.json"].sha256, before = store.participation();
  const changed = before !== null && before.agreed !== digest;
  if (changed) store.keepParticipation(null);
  const toggle = /** @type {HTMLInputElement} */ (at("share"));
  /** @type {AbortController | null} */
  let running = null;

  const show = () => {
    const record = store.participation();
    toggle.checked = record !== null;
    const reports = record?.reports ?? [];
    at("sent").replaceChildren(...reports.slice(-SHOWN).reverse().map(line));
    at("sent-heading").hidden = reports.length === 0;
    at("sent-heading").textContent = `Sent so far (${reports.length})`;
    at("share-state").hidden = record === null;
    at("nothing-sent").textContent =
      record === null ? "this page sends nothing." : "what you entered is not sent, only what is listed above.";
    if (record !== null && running === null) start();
    if (record === null) stop();
    onChange();
  };
  const start = () => {
    running = new AbortController();
    state("Waiting until this device is idle.");
    takePart(columns, show, running.signal).catch((problem) => state(`Stopped: ${problem.message}.`));
  };
  const stop = () => {
    running?.abort();
    running = null;
  };

  toggle.addEventListener("change", () => {
    store.keepParticipation(toggle.checked ? { ...emptyRecord(), agreed: digest, device: randomName() } : null);
    say(toggle.checked ? "You take part in training." : "You no longer take part. Nothing of it is kept.");
    show();
  });
  at("share-what").textContent = (changed ? CHANGED : "") + describe(plan, location.host);
  at("sharing").hidden = false;
  show();
  return show;
}

/** @param {string} sentence */
function state(sentence) {
  at("share-state").textContent = sentence;
}

/**
 * Say in two sentences what is sent, to whom, how often, and how it is protected.
 * @param {Plan} plan
 * @param {string} host
 */
export function describe({ sum, noise, vector: { length }, limits }, host) {
  const bytes = sum.protocol === "open" ? 4 * length : 96 + (sum.bits === 20 ? 5 * Math.ceil(length / 2) : (length * sum.bits) / 8);
  const often = limits.reports_per_day === 1 ? "once" : `${limits.reports_per_day} times`;
  const what =
    `When this device is idle and not on a metered connection, at most ${often} a day, this page sends ${host} ` +
    `how the model should change to suit you better (${sized(bytes)}), never what you entered.`;
  if (sum.protocol === "open") return `${what} It is not masked: ${host} can read it and infer from it some of what you entered.`;
  const how = noise === null ? "It is masked" : "It is mixed with noise and masked";
  return (
    `${what} ${how} before it leaves: only the sum over at least ${sum.least} devices can be read, ` +
    `and for that ${host} needs a second server, which another organisation runs.`
  );
}

/** @param {number} bytes */
function sized(bytes) {
  return bytes < 1e6 ? `${Math.ceil(bytes / 1e3)}\u00a0kB` : `${(bytes / 1e6).toFixed(1)}\u00a0MB`;
}

/** @param {SentReport} report */
function line({ time, round, bytes, protected: how, status }) {
  const when = new Date(1000 * time).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
  const result = { sending: "no answer yet", sent: "received", "too late": "too late, not used" }[status];
  return element("li", { text: `${when} · round ${round} · ${bytes.toLocaleString("en")} bytes · ${how} · ${result}` });
}

/**
 * Take part until it is switched off or refused: in one tab of this browser, when it is idle, off metered connections.
 * @param {() => import("./training.js").Columns} columns
 * @param {() => void} onRecord
 * @param {AbortSignal} signal
 */
async function takePart(columns, onRecord, signal) {
  const work = async () => {
    const worker = new Worker(new URL("./background.js", import.meta.url), { type: "module" });
    signal.addEventListener("abort", () => worker.terminate());
    try {
      for (let failures = 0; !signal.aborted; ) {
        await idle();
        const record = store.participation();
        if (signal.aborted || record === null) return;
        if (isMetered()) {
          state("Waiting for a connection that is not metered.");
          await sleep(AGAIN, signal);
          continue;
        }
        const answer = await ask(worker, { columns: columns(), record }, onRecord, signal);
        if (answer === null) return;
        if ("problem" in answer && answer.final) throw new Error(answer.problem);
        failures = "problem" in answer ? failures + 1 : 0;
        state("problem" in answer ? `Trying again later: ${answer.problem}.` : STATES[answer.step.reason]);
        await sleep("problem" in answer ? Math.min(LONGEST, AGAIN * 2 ** (failures - 1)) : answer.step.seconds, signal);
      }
    } finally {
      worker.terminate();
    }
  };
  if (navigator.locks === undefined) return work();
  await navigator.locks.request(`fedrecon:${location.pathname}`, { signal }, work).catch((problem) => {
    if (!signal.aborted) throw problem; // it waited for another tab until it was switched off
  });
}

/**
 * Let the worker do one step; keep what it wants to be kept.
 * @param {Worker} worker
 * @param {Exclude<import("./background.js").ToWorker, "written">} given
 * @param {() => void} onRecord
 * @param {AbortSignal} signal
 * @returns {Promise<Exclude<FromWorker, {write: any}> | null>} null if it was switched off
 */
function ask(worker, given, onRecord, signal) {
  return new Promise((resolve) => {
    signal.addEventListener("abort", () => resolve(null), { once: true });
    worker.onerror = (event) => resolve({ problem: event.message || "the worker cannot start", final: false });
    worker.onmessage = (/** @type {MessageEvent<FromWorker>} */ { data }) => {
      if (!("write" in data)) return resolve(data);
      if (signal.aborted) return;
      if (store.participation()?.name !== data.write.name) { // it was switched off, perhaps in another tab
        return resolve({ problem: "it was switched off meanwhile", final: false });
      }
      store.keepParticipation(data.write);
      onRecord();
      worker.postMessage("written");
    };
    worker.postMessage(given);
  });
}

/** Whether this connection costs money, or the person saves data. */
function isMetered() {
  const connection = /** @type {any} */ (navigator).connection; // not in every browser
  return Boolean(connection?.saveData || connection?.type === "cellular");
}

/** @returns {Promise<void>} when the page has nothing to do; a page that is never idle waits no longer than a minute */
function idle() {
  return new Promise((resolve) => {
    if (!("requestIdleCallback" in globalThis)) return void setTimeout(resolve, 2000);
    requestAnimationFrame(() => undefined); // some browsers look for idle time only after a frame
    requestIdleCallback(() => resolve(), { timeout: 60_000 });
  });
}
