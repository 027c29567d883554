// Taking part in training: check in, download, compute, protect, report, and sleep as told; in browsers and in node.
// @ts-check

import { digestOf, openManifest, readMetadata, readTensors, toHex, underPrefix } from "./bundle.js";
import { MOST_REPORTS, readPlan } from "./plan.js";
import { addNoise, sealReport } from "./sealing.js";
import { Trainer } from "./training.js";

/**
 * @typedef {import("./training.js").Columns} Columns
 * @typedef {import("./plan.js").Plan} Plan
 * @typedef {Object} SentReport what left the device, for its owner to see
 * @property {number} time in seconds since 1970
 * @property {string} plan the digest of the plan that it was computed for
 * @property {string} run
 * @property {number} round
 * @property {number} bytes
 * @property {string} protected how
 * @property {"sending" | "sent" | "too late"} status
 * @typedef {Object} ParticipantRecord all that taking part keeps, as in Python
 * @property {string} name random; what is drawn for this device follows from it
 * @property {SentReport[]} reports the newest last
 * @property {string | null} plan the digest of the plan that `state` belongs to
 * @property {Record<string, {shape: number[], data: number[]}>} state what the method keeps on this device
 * @property {string} [agreed] on a page: the digest of the plan whose terms the person read when they turned the switch on
 * @property {string} [device] on a page: a random name for the site's backend, so that its tokens are all for one device
 * @typedef {{read: () => Promise<ParticipantRecord | null>, write: (record: ParticipantRecord) => Promise<void>}} RecordStore the owner's own
 * @typedef {{plan: string, run: string, round: number, broadcast: string, size: number, ticket: string, seconds: number}} Task
 * @typedef {{seconds: number, reason: "reported" | "told" | "few examples" | "often enough", report?: SentReport}} Step
 * @typedef {Object} Options
 * @property {URL | string} server
 * @property {() => Promise<string>} token asked for again when it has expired
 * @property {RecordStore} store
 * @property {() => Columns} columns the owner's examples
 */

const DAY = 86_400, PATIENCE = 600, TIMEOUT = 600, MOST_BYTES = 1 << 28; // seconds, bytes

/** An answer of the server that trying again does not change. */
export class Refusal extends Error {}

/** A device that takes part in the training of one plan. */
export class Participant {
  /**
   * @param {Plan} plan
   * @param {string} digest of the plan's file: the owner agreed to this plan and to no other
   * @param {() => Promise<Trainer>} load called when there is something to compute
   * @param {Options} options
   */
  constructor(plan, digest, load, { server, token, store, columns }) {
    this.plan = plan;
    this.digest = digest;
    this.load = load;
    this.store = store;
    this.columns = columns;
    this.getToken = token;
    this.server = new URL(server);
    /** @type {string | null} */
    this.token = null;
    /** @type {Promise<Trainer> | null} */
    this.trainer = null;
  }

  /**
   * Open the plan of a bundle.
   * @param {(name: string) => Promise<ArrayBuffer>} read how its files are read
   * @param {Options & {runtime?: any}} options `runtime` is the package onnxruntime-web, in node
   */
  static async open(read, { runtime, ...options }) {
    const bundle = await openManifest(read);
    const file = await bundle.read("plan.json");
    const plan = readPlan(new TextDecoder().decode(file));
    return new Participant(plan, await digestOf(file), () => Trainer.open(bundle, plan, runtime), options);
  }

  /**
   * Take part until it is told to stop, or the server refuses for good.
   * @param {AbortSignal} signal
   * @param {(step: Step) => void} [onStep]
   */
  async run(signal, onStep = () => undefined) {
    for (let failures = 0; !signal.aborted; ) {
      let seconds = Math.min(3600, 5 * 2 ** failures);
      try {
        const step = await this.step(signal);
        onStep(step);
        [seconds, failures] = [step.seconds, 0];
      } catch (problem) {
        if (signal.aborted) return;
        if (problem instanceof Refusal) throw problem;
        failures++;
      }
      await sleep(seconds, signal);
    }
  }

  /**
   * Take part in one round if there is one, and say how long to sleep.
   * @param {AbortSignal} signal
   * @returns {Promise<Step>}
   */
  async step(signal) {
    const record = (await this.store.read()) ?? emptyRecord();
    const { reports_per_day: often, min_examples: least } = this.plan.limits;
    const last = record.reports.slice(-often), since = Date.now() / 1000 - last[0]?.time;
    if (last.length === often && since < DAY) return { seconds: DAY - since, reason: "often enough" };
    this.checkBudget(record);
    const columns = this.columns(), first = Object.keys(this.plan.examples.columns)[0];
    const width = this.plan.examples.columns[first].shape.reduce((product, n) => product * n, 1);
    if (columns[first].length / width < least) return { seconds: PATIENCE, reason: "few examples" };
    const answer = await this.request("v1/check-in", { signal });
    if (answer.status === 204) return { seconds: told(answer, PATIENCE), reason: "told" };
    const task = /** @type {Task} */ (await answer.json());
    if (task.plan !== this.digest) throw new Refusal("the server trains another plan than the one agreed to");
    if (typeof task.run !== "string" || !(task.seconds > 0)) throw new Refusal("the server does not answer like a coordinator");
    if (!(Number.isInteger(task.round) && task.round >= 0 && task.round < this.plan.rounds)) {
      throw new Refusal(`the server asks for round ${task.round}; the plan has rounds 0 to ${this.plan.rounds - 1}`);
    }
    const reported = record.reports.some(({ run, round }) => run === task.run && round === task.round);
    if (reported) return { seconds: told(answer, Math.min(Math.max(Number(task.seconds) || 0, 60), 3600)), reason: "told" };
    const body = await this.compute(task, record, columns, signal);
    signal.throwIfAborted();
    return { seconds: 1, reason: "reported", report: await this.send(task, record, body, signal) };
  }

  /**
   * Fail if noise no longer protects another report: it is enough for one report in each round of the plan, in whatever runs.
   * @param {ParticipantRecord} record
   */
  checkBudget({ reports }) {
    if (this.plan.noise === null || reports.filter(({ plan }) => plan === this.digest).length < this.plan.rounds) return;
    throw new Refusal(`this device has sent the ${this.plan.rounds} reports that the plan's noise protects`);
  }

  /**
   * Return the bytes of a report; what the method keeps goes into the record.
   * @param {Task} task
   * @param {ParticipantRecord} record
   * @param {Columns} columns
   * @param {AbortSignal} signal
   */
  async compute(task, record, columns, signal) {
    const { message, key, batch } = await this.download(task, signal);
    this.trainer ??= this.load();
    const trainer = await this.trainer;
    const { vector, state } = await trainer.update(columns, message, key, record.name, this.stateOf(record));
    record.plan = this.digest;
    record.state = Object.fromEntries([...state].map(([path, { shape, data }]) => [path, { shape, data: Array.from(data) }]));
    const { sum, noise } = this.plan;
    if (noise !== null) addNoise(/** @type {Uint32Array} */ (vector), noise.variance);
    if (sum.protocol === "open") return new Uint8Array(vector.slice().buffer);
    const run = `${task.run} ${task.broadcast}`; // so that the helper adds it only to reports on the same broadcast
    const purpose = { plan: fromHex(this.digest), run, round: task.round, batch };
    return sealReport(/** @type {Uint32Array} */ (vector), sum.bits, fromHex(sum.helper ?? ""), purpose);
  }

  /**
   * Return what the method kept on this device in the last round of this plan.
   * @param {ParticipantRecord} record
   * @returns {Map<string, import("./bundle.js").Tensor> | null} null before the first
   */
  stateOf(record) {
    if (record.plan !== this.digest) return null;
    return new Map(Object.entries(record.state).map(([path, { shape, data }]) => [path, { shape, data: Float32Array.from(data) }]));
  }

  /**
   * Download what the server sends in a round, and check that it is what the task names.
   * @param {Task} task
   * @param {AbortSignal} signal
   */
  async download(task, signal) {
    if (!/^[0-9a-f]{64}$/.test(task.broadcast) || !(task.size <= MOST_BYTES)) throw new Refusal("the task has no broadcast");
    const answer = await this.request(`v1/broadcasts/${task.broadcast}`, { signal }, [404, 410]);
    if (!answer.ok) throw new Error("the round is over"); // it ended while we asked; there will be others
    const data = await answer.arrayBuffer();
    if (data.byteLength !== task.size || (await digestOf(data)) !== task.broadcast) throw new Error("the broadcast was changed");
    const about = JSON.parse(readMetadata(data).fedrecon);
    const isKey = Array.isArray(about.key) && about.key.length === 2 && about.key.every((/** @type {any} */ word) => word === word >>> 0);
    if (!isKey || !/^[0-9a-f]{32}$/.test(about.batch)) throw new Refusal("the broadcast has no key or no batch");
    if (about.plan !== this.digest || about.run !== task.run || about.round !== task.round) {
      throw new Refusal("the broadcast is of another plan, run or round");
    }
    const message = underPrefix(readTensors(data), "message/");
    for (const [path, values] of message) {
      if (!values.data.every(Number.isFinite)) throw new Refusal(`the broadcast has numbers in ${path} that are not finite`);
    }
    return { message, key: about.key, batch: fromHex(about.batch) };
  }

  /**
   * Send a report, which is in the record before it leaves, so that no round is ever reported twice.
   * @param {Task} task
   * @param {ParticipantRecord} record
   * @param {Uint8Array} body
   * @param {AbortSignal} signal
   * @returns {Promise<SentReport>}
   */
  async send({ run, round, ticket, seconds }, record, body, signal) {
    /** @type {SentReport} */
    const report = {
      time: Math.floor(Date.now() / 1000), plan: this.digest, run, round, bytes: body.length,
      protected: protection(this.plan), status: "sending",
    };
    record.reports = [...record.reports, report].slice(-Math.max(MOST_REPORTS, this.plan.rounds));
    await this.store.write(record);
    const path = `v1/rounds/${round}/reports/${encodeURIComponent(ticket)}`;
    const headers = { "Content-Type": "application/octet-stream" };
    const options = { method: "PUT", body: /** @type {Uint8Array<ArrayBuffer>} */ (body), headers, signal };
    const end = Date.now() / 1000 + Math.min(seconds, DAY);
    for (let pause = 1; report.status === "sending"; pause = Math.min(2 * pause, 60)) {
      try {
        const { status } = await this.request(path, options, [404, 410]);
        report.status = status < 300 ? "sent" : "too late";
      } catch (problem) {
        if (signal.aborted || problem instanceof Refusal) throw problem;
        if (Date.now() / 1000 + pause > end) report.status = "too late";
        else await sleep(pause, signal); // the same bytes again: the server counts them once
      }
    }
    await this.store.write(record);
    return report;
  }

  /**
   * Ask the server, with a new token if the old one has expired.
   * @param {string} path
   * @param {RequestInit} options
   * @param {number[]} [expected] statuses that the caller handles, besides success
   * @returns {Promise<Response>}
   */
  async request(path, options, expected = []) {
    const fresh = this.token === null;
    const token = (this.token ??= await this.getToken());
    const headers = { ...options.headers, Authorization: `Bearer ${token}` };
    /** @type {RequestInit} */
    const safe = { credentials: "omit", redirect: "error", referrerPolicy: "no-referrer", cache: "no-store" };
    const limit = AbortSignal.timeout(1000 * TIMEOUT); // a server that never answers is asked again
    const ends = AbortSignal.any(options.signal ? [options.signal, limit] : [limit]);
    const answer = await fetch(new URL(path, this.server), { ...safe, ...options, headers, signal: ends });
    if (answer.ok || expected.includes(answer.status)) return answer;
    const { detail } = await answer.json().catch(() => ({ detail: undefined }));
    const message = `the server answered ${answer.status}${detail ? `: ${detail}` : ""}`;
    if (answer.status === 401 && !fresh) {
      this.token = null;
      return this.request(path, options, expected);
    }
    throw answer.status >= 500 || answer.status === 429 ? new Error(message) : new Refusal(message);
  }
}

/**
 * Return how many seconds the server wants to be left alone.
 * @param {Response} answer
 * @param {number} otherwise if it does not say
 */
function told(answer, otherwise) {
  const seconds = Number(answer.headers.get("Retry-After") ?? NaN);
  return Number.isFinite(seconds) ? Math.min(DAY, Math.max(1, seconds)) : otherwise;
}

/** @returns {ParticipantRecord} of a device that takes part for the first time, with a name that says nothing about it */
export function emptyRecord() {
  return { name: randomName(), reports: [], plan: null, state: {} };
}

export function randomName() {
  return toHex(crypto.getRandomValues(new Uint8Array(16)));
}

/**
 * Say how reports are protected.
 * @param {Plan} plan
 */
export function protection({ sum, noise }) {
  if (sum.protocol === "open") return "TLS only: the server sees each report";
  return `masked for two servers: they learn sums of ${sum.least} or more${noise === null ? "" : ", with noise from this device"}`;
}

/** @param {string} text */
function fromHex(text) {
  return Uint8Array.from(text.match(/../g) ?? [], (pair) => parseInt(pair, 16));
}

/**
 * Wait, unless it is told to stop.
 * @param {number} seconds
 * @param {AbortSignal} signal
 * @returns {Promise<void>}
 */
export function sleep(seconds, signal) {
  return new Promise((resolve) => {
    const finish = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", finish);
      resolve();
    };
    const timer = setTimeout(finish, 1000 * seconds);
    signal.addEventListener("abort", finish);
    if (signal.aborted) finish();
  });
}
