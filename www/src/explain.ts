// What a failure means for the person in front of the page, and what to do about it.

import { QandleError } from "qandle";

type Code = QandleError["code"];

const ADVICE: Record<Code, string> = {
  not_a_model: "This is no GGUF file. Check the address, or choose another file.",
  bad_model: "The file is damaged or cut short. Fetch it again.",
  unsupported_model: "Choose a GGUF file of a Qwen2 or Qwen2.5 model.",
  unsupported_quantization: "Choose another quantization of this model, such as Q4_K_M or Q8_0.",
  too_large: "Choose a smaller model, or a shorter context in the settings.",
  out_of_memory:
    "Close other tabs, choose a shorter context in the settings, or a smaller model, and load again.",
  network:
    "Check the connection and load again. The host must also allow other sites to read the file (CORS).",
  http_status: "Check the address: the server did not give the file.",
  integrity:
    "The bytes are not those that were promised. Load again; if it stays so, the source has changed.",
  invalid_request: "Change the settings or the message and try again.",
  template_error: "The model's chat template refuses this conversation. Start a new chat.",
  context_overflow:
    "Start a new chat, shorten the message, or load again with a longer context in the settings.",
  numeric: "The model produced no sensible numbers. Load it again, or choose another file.",
  worker_died:
    "The engine stopped. Load the model again; if it happens again, take one thread in the settings.",
  closed: "Load a model.",
  unsupported_browser: "Use a current version of Chrome, Edge, Firefox or Safari.",
};

/** What the page itself refuses before the engine is asked, with what to do about it. */
export class Refusal extends Error {
  readonly advice: string;

  constructor(what: string, advice: string) {
    super(what);
    this.name = "Refusal";
    this.advice = advice;
  }
}

/** A failure as two sentences: what happened, what to do. */
export function explain(error: unknown): { what: string; advice: string } {
  if (error instanceof Refusal) return { what: error.message, advice: error.advice };
  if (error instanceof QandleError) return { what: error.message, advice: ADVICE[error.code] };
  return {
    what: error instanceof Error ? error.message : String(error),
    advice: "Reload the page and try again.",
  };
}

/** Whether somebody pressed Stop or Cancel. */
export function isAbort(error: unknown): boolean {
  return error instanceof DOMException && error.name === "AbortError";
}

/** Whether the engine is gone, so that the model must be loaded again. */
export function isDeath(error: unknown): boolean {
  return error instanceof QandleError && (error.code === "worker_died" || error.code === "closed");
}
