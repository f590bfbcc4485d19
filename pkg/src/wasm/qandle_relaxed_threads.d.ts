// The glue of one threaded build is generated into dist/wasm/; this is the part of it that shell and threads use.
import type { ThreadGlue } from "../pool_worker.js";
import type { Glue } from "../protocol.js";

declare const init: Glue["default"] & ThreadGlue["default"];
export default init;
export declare const QandleWorker: Glue["QandleWorker"];
export declare const initThreadPool: (threads: number) => Promise<unknown>;
export declare const wbg_rayon_start_worker: ThreadGlue["wbg_rayon_start_worker"];
