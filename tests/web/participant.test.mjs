// A participant against a server of this test: what it sends, what it refuses, when it sleeps and what it remembers.
import assert from "node:assert/strict";
import { createDecipheriv, createHash, createPublicKey, diffieHellman, generateKeyPairSync, hkdfSync } from "node:crypto";
import { createServer } from "node:http";
import { after, test } from "node:test";

import { Participant, Refusal, sleep } from "../../src-device/fedrecon_device/web/participant.js";
import { Trainer } from "../../src-device/fedrecon_device/web/training.js";

const DIGEST = "5".repeat(64);
const PLAN = {
  rounds: 10,
  examples: { support: 2, query: 2, most: 4, columns: { item: { dtype: "int32", shape: [] } } },
  split: {
    counts: { support: [0, 1, 1, 2, 2], query: [0, 0, 1, 1, 2] },
    begins: { support: [0, 0, 0, 0, 0], query: [0, 1, 1, 2, 2] },
    pattern: null, by: null, redrawn: false,
  },
  rows: {},
  state: {},
  vector: { length: 3, dtype: "uint32", layout: [{ at: 0, values: "sum" }] },
  sum: { protocol: "open", bits: 32, helper: null, least: 2 },
  noise: null,
  limits: { reports_per_day: 3, min_examples: 2 },
};
/** A graph that adds the message to the number of examples. */
const GRAPH = {
  run: async (/** @type {Map<string, any>} */ inputs) => {
    const count = inputs.get("support_count").data[0] + inputs.get("query_count").data[0];
    return new Map([["sum", { data: Uint32Array.from(inputs.get("message/w").data, (x) => x + count), shape: [3] }]]);
  },
};

/** @param {object} about @param {number[]} values */
function safetensors(about, values) {
  const header = { "message/w": { dtype: "F32", shape: [3], data_offsets: [0, 12] }, __metadata__: { fedrecon: JSON.stringify(about) } };
  const text = Buffer.from(JSON.stringify(header).padEnd(8 * Math.ceil(JSON.stringify(header).length / 8)));
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length));
  return Buffer.concat([length, text, Buffer.from(Float32Array.from(values).buffer)]);
}

/** Start a server; `answers` may replace how it answers a kind of request. */
async function start(/** @type {Record<string, any>} */ answers = {}) {
  const about = { plan: DIGEST, run: "r", round: 7, key: [1, 2], batch: "ab".repeat(16), ...answers.about };
  const broadcast = safetensors(about, answers.values ?? [1, 2, 3]);
  const name = createHash("sha256").update(broadcast).digest("hex");
  const task = { plan: DIGEST, run: "r", round: 7, broadcast: name, size: broadcast.length, ticket: "t/1", seconds: 5, ...answers.task };
  /** @type {{method: string, url: string, token: string, body: Buffer}[]} */
  const requests = [];
  const server = createServer(async (request, response) => {
    const parts = [];
    for await (const part of request) parts.push(part);
    requests.push({ method: request.method, url: request.url, token: request.headers.authorization, body: Buffer.concat(parts) });
    const kind = request.url.includes("check-in") ? "checkIn" : request.method === "PUT" ? "report" : "broadcast";
    if (answers[kind]) return answers[kind](request, response, requests);
    if (kind === "checkIn") return response.end(JSON.stringify(task));
    if (kind === "broadcast") return response.end(broadcast);
    response.writeHead(201).end();
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", () => resolve(null)));
  after(() => server.close());
  const { port } = /** @type {import("node:net").AddressInfo} */ (server.address());
  return { requests, broadcast: name, address: `http://127.0.0.1:${port}/` };
}

/** A participant of two examples, and what it remembers. */
function join(/** @type {string} */ server, plan = PLAN, items = [4, 5]) {
  const kept = { record: null, writes: 0 };
  const store = {
    read: async () => structuredClone(kept.record),
    write: async (record) => Object.assign(kept, { record: structuredClone(record), writes: kept.writes + 1 }),
  };
  const columns = () => ({ item: Int32Array.from(items) });
  let tokens = 0;
  const token = async () => `token-${++tokens}`;
  const load = async () => new Trainer(/** @type {any} */ (plan), /** @type {any} */ (GRAPH));
  return { participant: new Participant(/** @type {any} */ (plan), DIGEST, load, { server, token, store, columns }), kept };
}

const signal = new AbortController().signal;

test("a round is downloaded, computed, reported and recorded", async () => {
  const { requests, address } = await start();
  const { participant, kept } = join(address);
  const { reason, report } = await participant.step(signal);
  assert.equal(reason, "reported");
  assert.deepEqual(requests.map(({ method, url }) => `${method} ${url.replace(/[0-9a-f]{64}/, "X")}`), [
    "GET /v1/check-in", "GET /v1/broadcasts/X", "PUT /v1/rounds/7/reports/t%2F1",
  ]);
  assert.deepEqual(new Set(requests.map((one) => one.token)), new Set(["Bearer token-1"]));
  assert.deepEqual([...new Uint32Array(Uint8Array.from(requests[2].body).buffer)], [3, 4, 5]);
  assert.deepEqual(kept.record.reports, [report]);
  const { time, protected: how, ...rest } = report;
  assert.ok(Math.abs(Date.now() / 1000 - time) < 10);
  assert.match(how, /the server sees each report/);
  assert.deepEqual(rest, { plan: DIGEST, run: "r", round: 7, bytes: 12, status: "sent" });
  assert.match(kept.record.name, /^[0-9a-f]{32}$/);
});

test("a seed opens for the broadcast that the report was computed from, and for no other", async () => {
  const { requests, broadcast, address } = await start();
  const { publicKey, privateKey } = generateKeyPairSync("x25519");
  const shared = Buffer.from(publicKey.export({ format: "jwk" }).x, "base64url");
  const sum = { protocol: "two-servers", bits: 32, helper: shared.toString("hex"), least: 2 };
  await join(address, /** @type {any} */ ({ ...PLAN, sum })).participant.step(signal);
  const [id, ephemeral, sealed, tag] = [[0, 16], [16, 48], [48, 80], [80, 96]].map(([from, to]) => requests[2].body.subarray(from, to));
  const jwk = { kty: "OKP", crv: "X25519", x: ephemeral.toString("base64url") };
  const secret = diffieHellman({ privateKey, publicKey: createPublicKey({ key: jwk, format: "jwk" }) });
  const key = Buffer.from(hkdfSync("sha256", secret, Buffer.concat([ephemeral, shared]), "fedrecon two servers v1", 32));
  const opened = (/** @type {string} */ run) => {
    const [round, length] = [Buffer.alloc(8), Buffer.alloc(8)];
    round.writeBigUInt64BE(7n);
    length.writeBigUInt64BE(3n);
    const named = createHash("sha256").update(run).digest();
    const cipher = createDecipheriv("aes-256-gcm", key, Buffer.alloc(12)).setAuthTag(tag);
    cipher.setAAD(Buffer.concat([Buffer.from(DIGEST, "hex"), named, Buffer.from("ab".repeat(16), "hex"), round, id, length]));
    return Buffer.concat([cipher.update(sealed), cipher.final()]);
  };
  assert.equal(opened(`r ${broadcast}`).length, 32);
  assert.throws(() => opened("r"));
  assert.throws(() => opened(`r ${"0".repeat(64)}`));
});

test("with noise it sends as many reports as the plan has rounds, in whatever runs", async () => {
  const { requests, address } = await start();
  const { participant, kept } = join(address, /** @type {any} */ ({ ...PLAN, rounds: 8, noise: { variance: 4 } }));
  const sent = Array.from({ length: 8 }, (_, round) => ({ plan: DIGEST, run: "earlier", round, time: 0 }));
  kept.record = { name: "x", reports: [...sent.slice(1), { ...sent[0], plan: "6".repeat(64) }], plan: null, state: {} };
  assert.equal((await participant.step(signal)).reason, "reported");
  await assert.rejects(participant.step(signal), (problem) => problem instanceof Refusal && /sent the 8 reports/.test(problem.message));
  assert.equal(requests.filter(({ method }) => method === "PUT").length, 1);
});

test("a round is never reported twice, whatever the server says, also after a restart", async () => {
  const { requests, address } = await start();
  const { participant, kept } = join(address);
  await participant.step(signal);
  const again = join(address);
  again.kept.record = kept.record;
  assert.deepEqual(await again.participant.step(signal), { seconds: 60, reason: "told" });
  assert.equal(requests.filter(({ method }) => method === "PUT").length, 1);
});

test("a report is in the record before it leaves, and a lost answer is asked for with the same bytes", async () => {
  let records = 0;
  const { requests, address } = await start({
    report: (request, response, all) => {
      records = kept.writes;
      if (all.filter(({ method }) => method === "PUT").length === 1) return request.socket.destroy();
      response.writeHead(200).end();
    },
  });
  const { participant, kept } = join(address);
  assert.equal((await participant.step(signal)).report.status, "sent");
  assert.equal(records, 1);
  const [first, second] = requests.filter(({ method }) => method === "PUT");
  assert.deepEqual(first.body, second.body);
});

test("a report that the server does not take now is sent again until its round is over", async () => {
  for (const [seconds, refusals, status] of /** @type {const} */ ([[600, 2, "sent"], [0.5, Infinity, "too late"]])) {
    let left = refusals;
    const { requests, address } = await start({
      task: { seconds }, report: (_, response) => response.writeHead(left-- > 0 ? 429 : 201).end(),
    });
    const { participant, kept } = join(address);
    assert.equal((await participant.step(signal)).report.status, status);
    assert.equal(kept.record.reports[0].status, status);
    const bodies = requests.filter(({ method }) => method === "PUT").map(({ body }) => body.toString("hex"));
    assert.equal(bodies.length, status === "sent" ? 3 : 1);
    assert.equal(new Set(bodies).size, 1);
  }
});

test("it sleeps as it is told, with few examples, and when it has reported often enough", async () => {
  const { requests, address } = await start({ checkIn: (_, response) => response.writeHead(204, { "Retry-After": "90" }).end() });
  assert.deepEqual(await join(address).participant.step(signal), { seconds: 90, reason: "told" });
  for (const [seconds, pause] of [[5, 60], [900, 900], [1e9, 3600]]) {
    const { participant, kept } = join((await start({ task: { seconds } })).address);
    kept.record = { name: "x", reports: [{ time: 0, run: "r", round: 7 }], plan: null, state: {} };
    assert.deepEqual(await participant.step(signal), { seconds: pause, reason: "told" });
  }
  assert.equal((await join(address, PLAN, [4]).participant.step(signal)).reason, "few examples");
  const { participant, kept } = join(address);
  kept.record = { name: "x", reports: Array(3).fill({ time: Date.now() / 1000 - 3600 }), plan: null, state: {} };
  const { seconds, reason } = await participant.step(signal);
  assert.equal(reason, "often enough");
  assert.ok(Math.abs(seconds - 23 * 3600) < 10);
  assert.equal(requests.length, 1);
});

test("another plan, round or broadcast than agreed to is refused before anything is computed", async () => {
  const wrong = [
    { task: { plan: "6".repeat(64) } }, { about: { round: 8 } }, { about: { run: "other" } }, { about: { plan: "6".repeat(64) } },
    { task: { broadcast: "../../secret" } }, { task: { size: 2 ** 30 } },
    { task: { round: 10 }, about: { round: 10 } }, { task: { round: -1 }, about: { round: -1 } }, { values: [1, NaN, 3] },
    { values: [Infinity, 2, 3] }, { about: { key: [1] } }, { about: { key: [1, -2] } }, { about: { key: [1, "2"] } },
    { about: { batch: "ab" } }, { about: { batch: "xy".repeat(16) } }, { task: { run: 7 }, about: { run: 7 } }, { task: { seconds: "soon" } },
  ];
  for (const answers of wrong) {
    const { requests, address } = await start(answers);
    await assert.rejects(join(address).participant.step(signal), Refusal, JSON.stringify(answers));
    assert.equal(requests.filter(({ method }) => method === "PUT").length, 0);
  }
  const { address } = await start({ broadcast: (_, response) => response.end("x".repeat(200)) });
  await assert.rejects(join(address).participant.step(signal), /was changed/);
});

test("a round that ends before its broadcast is fetched is no reason to give up", async () => {
  const { address } = await start({ broadcast: (_, response) => response.writeHead(404).end() });
  await assert.rejects(join(address).participant.step(signal), (problem) => !(problem instanceof Refusal));
});

test("an expired token is replaced once; a device that is not admitted stops", async () => {
  let refusals = 0;
  const { requests, address } = await start({
    checkIn: (request, response) =>
      request.headers.authorization === "Bearer token-2" && ++refusals < 2
        ? response.writeHead(204).end()
        : response.writeHead(401, { "Content-Type": "application/problem+json" }).end('{"title": "unauthorized", "detail": "expired"}'),
  });
  const { participant } = join(address);
  await assert.rejects(participant.step(signal), /401: expired/);
  participant.token = "token-1";
  assert.equal((await participant.step(signal)).reason, "told");
  assert.deepEqual(requests.map((one) => one.token.slice(-1)), ["1", "1", "2"]);
});

test("reports that come too late are recorded as such", async () => {
  for (const status of [410, 404]) {
    const { address } = await start({ report: (_, response) => response.writeHead(status).end() });
    const { participant, kept } = join(address);
    await participant.step(signal);
    assert.equal(kept.record.reports[0].status, "too late");
  }
});

test("it runs until it is told to stop, also while it sleeps", async () => {
  const { requests, address } = await start({ checkIn: (_, response) => response.writeHead(204, { "Retry-After": "1" }).end() });
  const controller = new AbortController();
  const running = join(address).participant.run(controller.signal, () => requests.length === 2 && controller.abort());
  await running;
  assert.equal(requests.length, 2);
  const begun = performance.now();
  setTimeout(() => controller.abort(), 10);
  await sleep(1000, AbortSignal.timeout(20));
  assert.ok(performance.now() - begun < 60_000); // not 1000 s, also on a busy machine
});
