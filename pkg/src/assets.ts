// Where the package's own files are when the caller has put them elsewhere than beside this module.

import { failure, messageOf } from "./errors.js";
import { withSlash } from "./source.js";

/** The folder that the option `assetsUrl` names, with a slash at its end. */
export function assetsFolder(assetsUrl: string | URL): string {
  try {
    const folder = new URL(assetsUrl, globalThis.document?.baseURI ?? globalThis.location?.href);
    return withSlash(folder.href);
  } catch (cause) {
    throw failure("invalid_request", `the option assetsUrl is not a URL: ${messageOf(cause)}`, { cause });
  }
}
