// Module workers whose script may be on another origin. Apart from spawn.ts, so that a pool thread's bundle does not
// reach the engine's worker.

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
