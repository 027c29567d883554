// The page: opens the bundle beside it, shows what its task needs, and says what is kept.
// @ts-check

import { openBundle } from "./bundle.js";
import * as store from "./store.js";
import { say } from "./widgets.js";

/** @param {string} id @returns {HTMLElement} */
const at = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

async function main() {
  const bundle = await openBundle(new URL("..", import.meta.url));
  /** @type {{show: () => void | Promise<void>, describe: () => string} | null} */
  let page = null;
  const describe = () => {
    const size = store.size();
    at("kept-what").textContent = size ? `${page?.describe()}, ${size} bytes` : "nothing";
    at("forget").toggleAttribute("disabled", size === 0);
  };
  const options = { onChange: describe };
  page =
    bundle.manifest.task === "ratings"
      ? await (await import("./films.js")).showFilms(bundle, options)
      : await (await import("./writing.js")).showWriting(bundle, options);
  describe();
  at("model").textContent = bundle.digest;
  at("loading").hidden = true;

  const dialog = /** @type {HTMLDialogElement} */ (at("really"));
  at("forget").addEventListener("click", () => dialog.showModal());
  dialog.addEventListener("close", async () => {
    if (dialog.returnValue !== "forget") return;
    store.forget();
    await page?.show();
    describe();
    say("Everything has been forgotten.");
    at("kept-what").focus();
  });
  addEventListener("storage", async () => {
    await page?.show(); // another tab rated or forgot
    describe();
  });
}

async function offline() {
  if (!("serviceWorker" in navigator)) return;
  await navigator.serviceWorker.register(new URL("./sw.js", import.meta.url), { type: "module" });
  await navigator.serviceWorker.ready;
  at("offline").hidden = false;
}

main()
  .then(offline)
  .then(() => document.documentElement.setAttribute("data-ready", "yes"))
  .catch((problem) => {
    at("loading").textContent = `This page cannot start: ${problem instanceof Error ? problem.message : problem}`;
    at("loading").setAttribute("role", "alert");
    document.documentElement.setAttribute("data-ready", "failed");
  });
