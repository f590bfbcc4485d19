// The engine's half of a threaded build's pool: the glue calls it as `startWorkers`, in place of wasm-bindgen-rayon's own
// file. The page makes the threads (threads.ts), as a worker that makes workers can wait for ever in Firefox. What they
// share goes to them directly, through ports.

import type { ThreadShare, ThreadsReady, ThreadsWanted } from "./protocol.js";

/** The Rust side's builder, in glue. */
interface PoolBuilder {
  numThreads(): number;
  /** Address of the channel from which threads take their work. */
  receiver(): number;
  /** Builds the pool once every thread listens. */
  build(): void;
}

/** The part of the worker's scope that is used. */
interface PoolScope {
  postMessage(message: ThreadsWanted, transfer: Transferable[]): void;
  addEventListener(type: "message", listener: (event: { data: ThreadsReady }) => void): void;
  removeEventListener(type: "message", listener: (event: { data: ThreadsReady }) => void): void;
}

/** Called by the glue with its compiled module and its shared memory. A page that cannot make them ends this worker. */
export async function startWorkers(
  module: WebAssembly.Module,
  memory: WebAssembly.Memory,
  builder: PoolBuilder,
): Promise<void> {
  const scope = globalThis as unknown as PoolScope;
  const share: ThreadShare = { init: { module_or_path: module, memory }, receiver: builder.receiver() };
  const channels = Array.from({ length: builder.numThreads() }, () => new MessageChannel());
  await new Promise<void>((resolve) => {
    scope.addEventListener("message", function listen({ data }) {
      if (data?.type !== "threads") return;
      scope.removeEventListener("message", listen);
      resolve();
    });
    const ports = channels.map(({ port2 }) => port2);
    scope.postMessage({ type: "threads", ports }, ports);
    for (const { port1 } of channels) port1.postMessage(share);
  });
  // Not before: in Firefox memory sent through a port that is closed does not arrive.
  for (const { port1 } of channels) port1.close();
  builder.build();
}
