// The glue of one build is generated into dist/wasm/; this is the part of it that the shell uses.
import type { Glue } from "../protocol.js";

declare const init: Glue["default"];
export default init;
export declare const QandleWorker: Glue["QandleWorker"];
