// The page: opens the bundle beside it, shows what its task needs, and says what is kept.
// @ts-check

import { openBundle } from "./bundle.js";
import * as store from "./store.js";
import { at, say } from "./widgets.js";

/**
 * @typedef {Object} Task what one part of the page offers
 * @property {() => void | Promise<void>} show
 * @property {() => string} describe what is kept
 * @property {() => import("./training.js").Columns} columns the person's examples, as models read them
 */

const worker = "serviceWorker" in navigator ? navigator.serviceWorker : null;
const hadWorker = Boolean(worker?.controller);
let replaced = false; // whether files of a newer bundle replaced those that this page started with

async function main() {
  const bundle = await openBundle(new URL("..", import.meta.url));
  /** @type {Task | null} */
  let page = null;
  const describe = () => {
    const size = store.size();
    at("kept-what").textContent = size ? `${page?.describe()}, ${size.toLocaleString("en")} bytes` : "nothing";
    at("kept-where").textContent = store.isTemporary() ? "On this page, until you close it" : "In this browser";
    at("full").hidden = !store.isTemporary();
    at("forget").toggleAttribute("disabled", size === 0);
  };
  const options = { onChange: describe };
  page =
    bundle.manifest.task === "text"
      ? await (await import("./writing.js")).showWriting(bundle, options)
      : await (await import("./items.js")).showItems(bundle, options);
  const trains = "web/sharing.js" in bundle.manifest.files;
  const showSharing = trains ? await (await import("./sharing.js")).showSharing(bundle, page.columns, describe) : describe;
  describe();
  at("model").textContent = bundle.digest;
  at("loading").hidden = true;

  const dialog = /** @type {HTMLDialogElement} */ (at("really"));
  at("forget").addEventListener("click", () => dialog.showModal());
  dialog.addEventListener("close", async () => {
    if (dialog.returnValue !== "forget") return;
    store.forget();
    await page?.show();
    showSharing();
    say("Everything has been forgotten.");
    at("kept-what").focus();
  });
  addEventListener("storage", async () => {
    await page?.show(); // another tab rated or forgot
    showSharing();
  });
}

async function offline() {
  if (worker === null) return;
  const registration = await worker.register(new URL("./sw.js", import.meta.url), { type: "module" });
  await worker.ready;
  at("offline").hidden = false;
  if (hadWorker) await registration.update(); // is there a newer model? fails without a network
}

worker?.addEventListener("controllerchange", () => {
  if (!hadWorker) return; // the first one brings nothing new
  replaced = true;
  at("newer").hidden = false;
});
at("reload").addEventListener("click", () => location.reload());

main()
  .then(() => offline().catch(() => undefined)) // a browser may refuse workers; all else works without one
  .then(() => document.documentElement.setAttribute("data-ready", "yes"))
  .catch((problem) => {
    if (replaced) return location.reload(); // some files were of one bundle and some of another
    at("loading").textContent = `This page cannot start: ${problem instanceof Error ? problem.message : problem}`;
    at("loading").setAttribute("role", "alert");
    document.documentElement.setAttribute("data-ready", "failed");
  });
