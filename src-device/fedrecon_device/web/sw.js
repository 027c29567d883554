// The service worker: keeps every file of the bundle that the page reads, so that it works without a network.
// @ts-check
/// <reference lib="webworker" />

const VERSION = "@VERSION@"; // the digest of what the bundle holds: another bundle is another version
const NAME = `fedrecon-${VERSION}`;
const worker = /** @type {ServiceWorkerGlobalScope} */ (/** @type {unknown} */ (self));
const base = new URL("..", worker.location.href);
/** @type {string[]} */
const FILES = ["@FILES@"];

worker.addEventListener("install", (event) => {
  const all = ["web/", "manifest.json", ...FILES].map((name) => new URL(name, base).href);
  event.waitUntil(
    caches
      .open(NAME)
      .then((cache) => cache.addAll(all))
      .then(() => worker.skipWaiting()),
  );
});

worker.addEventListener("activate", (event) => {
  event.waitUntil(
    caches
      .keys()
      .then((names) => Promise.all(names.filter((n) => n.startsWith("fedrecon-") && n !== NAME).map((n) => caches.delete(n))))
      .then(() => worker.clients.claim()),
  );
});

worker.addEventListener("fetch", (event) => {
  if (event.request.method !== "GET") return;
  event.respondWith(
    caches.open(NAME).then(async (cache) => (await cache.match(event.request, { ignoreSearch: true })) ?? fetch(event.request)),
  );
});
