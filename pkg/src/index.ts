// The package's public list. Importing it does nothing by itself.

export { QandleError, type QandleErrorOptions } from "./errors.js";
export { load } from "./load.js";
export type * from "./types.js";
export { models } from "./unavailable.js";
