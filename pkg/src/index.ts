// The package's public list. Importing it does nothing by itself.

export { QandleError, type QandleErrorOptions } from "./errors.js";
export { load } from "./load.js";
export { models } from "./models.js";
export type * from "./types.js";
