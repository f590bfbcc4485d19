// Module workers whose script may be on another origin. Apart from spawn.ts, so that a pool thread's bundle does not
// reach the engine's worker.

/**
 * Whether a file of the package, by its `import.meta.url`, comes from another origin, whose scripts no worker may start
 * from. Bundlers that write a `file:` URL there have put the file beside the page's own.
 */
export function isForeign(fileUrl: string): boolean {
  const { protocol, origin } = new URL(fileUrl);
  return protocol.startsWith("http") && origin !== globalThis.location?.origin;
}

/** A module worker from any origin: another origin's script is imported by a small one of our own. */
export function moduleWorker(url: URL, name?: string): Worker {
  if (url.origin === globalThis.location?.origin) return new Worker(url, { type: "module", name });
  const source = `import ${JSON.stringify(url.href)};`;
  const bootstrap = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  const worker = new Worker(bootstrap, { type: "module", name });
  // The script is fetched after the constructor returned; its first message says that it was.
  worker.addEventListener("message", () => URL.revokeObjectURL(bootstrap), { once: true });
  return worker;
}
