// Several devices in one process of node, each with one person's examples: node devices.mjs < settings.json
//
// Settings: {"bundle": folder, "scripts": the folder web of fedrecon_device, "runtime": the folder dist of onnxruntime-web,
// "server": address, "devices": [{"store": file, "token": text, "columns": {...}, "rounds": how many it reports before it
// leaves, null for all}]}.
import { readFile, rename, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const settings = JSON.parse(await readFile("/dev/stdin", "utf8"));
const { Participant } = await import(pathToFileURL(join(settings.scripts, "participant.js")).href);
const ort = await import(pathToFileURL(join(settings.runtime, "ort.node.min.mjs")).href);
ort.env.logLevel = "error";

/** Files of the bundle. */
const read = async (name) => {
  const data = await readFile(join(settings.bundle, name));
  return data.buffer.slice(data.byteOffset, data.byteOffset + data.byteLength);
};

/** A person's record in a file of their own. */
const storeIn = (file) => ({
  read: () => readFile(file, "utf8").then(JSON.parse, () => null),
  write: async (record) => {
    await writeFile(`${file}.partial`, JSON.stringify(record), { mode: 0o600 });
    await rename(`${file}.partial`, file);
  },
});

const devices = await Promise.all(
  settings.devices.map(async ({ store, token, columns, rounds }) => {
    const person = {};
    const options = { server: settings.server, token: async () => token, store: storeIn(store), columns: () => person, runtime: ort };
    const participant = await Participant.open(read, options);
    for (const [feature, { dtype }] of Object.entries(participant.plan.examples.columns)) {
      person[feature] = (dtype === "float32" ? Float32Array : Int32Array).from(columns[feature].flat(Infinity));
    }
    return { participant, rounds };
  }),
);
const shared = devices[0]?.participant.load(); // one graph for all of them
const stop = new AbortController();
process.on("SIGTERM", () => stop.abort());
let reports = 0;
await Promise.all(
  devices.map(async ({ participant, rounds }) => {
    participant.trainer = shared;
    const leave = new AbortController();
    const signal = AbortSignal.any([stop.signal, leave.signal]);
    let sent = 0;
    await participant.run(signal, ({ report }) => {
      if (report === undefined) return;
      reports++;
      if (++sent === rounds) leave.abort();
    }).catch((problem) => console.error(String(problem)));
  }),
);
console.log(JSON.stringify({ devices: devices.length, reports }));
process.exit(0); // onnxruntime-web keeps node alive
