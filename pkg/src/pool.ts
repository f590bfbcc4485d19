// The engine's half of a threaded build's pool: the glue calls it as `startWorkers`, in place of wasm-bindgen-rayon's own
// file. The page makes the threads (threads.ts), as a worker that makes workers can wait for ever in Firefox.

import type { ThreadsReady, ThreadsWanted } from "./protocol.js";

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
  postMessage(message: ThreadsWanted): void;
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
  const init = { module_or_path: module, memory };
  await new Promise<void>((resolve) => {
    scope.addEventListener("message", function listen({ data }) {
      if (data?.type !== "threads") return;
      scope.removeEventListener("message", listen);
      resolve();
    });
    scope.postMessage({ type: "threads", count: builder.numThreads(), init, receiver: builder.receiver() });
  });
  builder.build();
}
