// The service worker: the page's own files, for a start without a network. Of the engine's builds it keeps those for the
// best instruction set that this browser has, and those that a page asks for. A request for anything else, such as a
// model, is left to the browser: weights are kept by the engine's worker, which reads them without a fetch.

import type { Tier } from "qandle";
import { platform, tiers } from "qandle/dist/tiers.js";
import { cleanupOutdatedCaches, type PrecacheEntry, precacheAndRoute } from "workbox-precaching";
import type { ToServiceWorker } from "../src/offline_messages.js";

declare const self: ServiceWorkerGlobalScope;

/** Pages in several folders of one origin share its caches. */
const BUILDS = `qandle-builds-${self.registration.scope}`;

/** This version's builds: URL → instruction set. Each has one with threads, and one without to which a load steps down. */
const builds = new Map<string, Tier>();
const shell: PrecacheEntry[] = [];
for (const entry of self.__WB_MANIFEST) {
  const { url, revision } = typeof entry === "string" ? { url: entry, revision: null } : entry;
  const tier = tierOf(url);
  if (tier === undefined) shell.push({ url, revision });
  else builds.set(new URL(url, self.location.href).href, tier);
}

// The page's address may carry wishes (?model=…), which the page reads: the file is the same.
precacheAndRoute(shell, { ignoreURLParametersMatching: [/^/], cleanURLs: false });
cleanupOutdatedCaches();

self.addEventListener("install", (event) => event.waitUntil(keepUsed()));
self.addEventListener("activate", (event) => event.waitUntil(dropOld()));

self.addEventListener("fetch", (event) => {
  const { method, url } = event.request;
  if (method === "GET" && builds.has(url)) event.respondWith(answer(event.request));
});

self.addEventListener("message", (event) => {
  const message = event.data as ToServiceWorker;
  switch (message.type) {
    case "keep":
      return event.waitUntil(keep(new Set([message.tier])));
    case "takeOver":
      return event.waitUntil(self.skipWaiting());
    default:
      message satisfies never;
  }
});

/** The instruction set that a file of the engine is built for; undefined for any other file. */
function tierOf(url: string): Tier | undefined {
  const tier = /\/qandle_(simd128|relaxed)(?:_threads)?-[^/]+\.wasm$/.exec(url)?.[1];
  return tier === "simd128" || tier === "relaxed" ? tier : undefined;
}

async function answer(request: Request): Promise<Response> {
  const cache = await caches.open(BUILDS);
  return (await cache.match(request.url)) ?? fetch(request);
}

/** Before this version may take over it has what the one before had, so that it too starts without a network. */
async function keepUsed(): Promise<void> {
  const cache = await caches.open(BUILDS);
  const used = (await cache.keys()).map(({ url }) => tierOf(url));
  const best = tiers(platform()).at(-1);
  await keep(new Set([best, ...used]));
}

async function keep(wanted: ReadonlySet<Tier | undefined>): Promise<void> {
  const cache = await caches.open(BUILDS);
  for (const [url, tier] of builds) {
    if (wanted.has(tier) && (await cache.match(url)) === undefined) await cache.add(url);
  }
}

async function dropOld(): Promise<void> {
  const cache = await caches.open(BUILDS);
  for (const request of await cache.keys()) {
    if (!builds.has(request.url)) await cache.delete(request);
  }
}
