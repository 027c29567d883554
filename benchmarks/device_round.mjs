// A device's rounds in JavaScript without a network, in node and on a page: node device_round.mjs FOLDER RUNTIME RATED

/**
 * Train on made-up ratings as a participant does, from drawing examples to a sealed report; return milliseconds.
 * @param {{folder: string, read: (name: string) => Promise<ArrayBuffer>, runtime?: any, rated: number}} options
 *   `folder` is the bundle's address; `runtime` is the package onnxruntime-web, in node
 */
export async function timeRounds({ folder, read, runtime, rated }) {
  const { Participant, emptyRecord } = await import(`${folder}/web/participant.js`);
  const { openManifest } = await import(`${folder}/web/bundle.js`);
  const columns = {
    item: Int32Array.from({ length: rated }, (_, k) => k),
    rating: Float32Array.from({ length: rated }, (_, k) => 1 + (k % 5)),
  };
  const begun = performance.now();
  const bundle = await openManifest(read);
  await bundle.load();
  const participant = await Participant.open(read, { server: "http://localhost", runtime });
  participant.trainer = participant.load();
  await participant.trainer;
  const load = performance.now() - begun;
  const message = new Map([...bundle.tables].map(([path, table]) => [`method/${path}`, table]));
  const record = emptyRecord(), times = [];
  let bytes = 0;
  for (let round = 0; round < 21; round++) {
    participant.download = async () => ({ message, key: [0, round], batch: new Uint8Array(16) });
    const start = performance.now();
    ({ length: bytes } = await participant.compute({ run: "benchmark", broadcast: "", round }, record, columns));
    times.push(performance.now() - start);
  }
  const [first, ...later] = times;
  later.sort((a, b) => a - b);
  return { load_ms: load, first_ms: first, ms: (later[9] + later[10]) / 2, report_bytes: bytes };
}

if (globalThis.process?.versions?.node) {
  const { readFile } = await import("node:fs/promises");
  const { join } = await import("node:path");
  const { pathToFileURL } = await import("node:url");
  const [folder, dist, rated] = process.argv.slice(2);
  const runtime = await import(pathToFileURL(join(dist, "ort.node.min.mjs")).href);
  runtime.env.logLevel = "error";
  const read = async (/** @type {string} */ name) => {
    const data = await readFile(join(folder, name));
    return data.buffer.slice(data.byteOffset, data.byteOffset + data.byteLength);
  };
  const figures = await timeRounds({ folder: pathToFileURL(folder).href, read, runtime, rated: Number(rated) });
  const status = await readFile("/proc/self/status", "utf8"); // maxRSS would include the process that started this one
  console.log(JSON.stringify({ ...figures, MB: Number(status.match(/VmHWM:\s+(\d+)/)[1]) / 1e3 }));
  process.exit(0); // onnxruntime-web keeps node alive
}
