// The worker in which the page takes part in training, so that the page stays responsive.
// @ts-check
/// <reference lib="webworker" />

import { fetchFrom } from "./bundle.js";
import { Participant, Refusal } from "./participant.js";

/**
 * @typedef {import("./participant.js").ParticipantRecord} ParticipantRecord
 * @typedef {{columns: import("./training.js").Columns, record: ParticipantRecord} | "written"} ToWorker
 * @typedef {{write: ParticipantRecord} | {step: import("./participant.js").Step} | {problem: string, final: boolean}} FromWorker
 */

const worker = /** @type {DedicatedWorkerGlobalScope} */ (/** @type {unknown} */ (self));
const base = new URL("..", import.meta.url);
const signal = new AbortController().signal; // the page ends the whole worker
/** @type {Exclude<ToWorker, "written"> | null} */
let given = null;
/** @type {() => void} */
let onWritten = () => undefined;
/** @type {Promise<Participant> | null} */
let participant = null;

/** @param {FromWorker} message */
const tell = (message) => worker.postMessage(message);

/** Ask the site's own server where to take part, and for a token, always for the same device. */
async function invitation() {
  const device = encodeURIComponent(given?.record.device ?? "");
  return JSON.parse(new TextDecoder().decode(await fetchFrom(base)(`participation.json?device=${device}`)));
}

async function open() {
  const { server } = await invitation();
  const store = {
    read: async () => given?.record ?? null,
    /** @param {ParticipantRecord} record */
    write: (record) =>
      /** @type {Promise<void>} */ (
        new Promise((resolve) => {
          onWritten = resolve;
          tell({ write: record });
        })
      ),
  };
  return Participant.open(fetchFrom(base), {
    server: new URL(server, base),
    token: async () => (await invitation()).token,
    store,
    columns: () => given?.columns ?? {},
  });
}

worker.addEventListener("message", async (/** @type {MessageEvent<ToWorker>} */ { data }) => {
  if (data === "written") return onWritten();
  given = data;
  try {
    participant ??= open();
    const opened = await participant;
    if (data.record.agreed !== opened.digest) throw new Refusal("the terms have changed; reload the page");
    tell({ step: await opened.step(signal) });
  } catch (problem) {
    participant = null;
    tell({ problem: problem instanceof Error ? problem.message : String(problem), final: problem instanceof Refusal });
  }
});
