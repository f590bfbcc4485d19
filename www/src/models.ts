// The models that the page offers, with what a download costs.

/** One line of the chooser. */
export interface Offer {
  id: string;
  name: string;
  about: string;
  /** What `load` takes; null where the user names it (an address, a file). */
  source: string | null;
  /** Bytes of the download; null where unknown. */
  bytes: number | null;
}

export const OFFERS: readonly Offer[] = [
  {
    id: "coder-0.5b",
    name: "Qwen2.5-Coder 0.5B",
    about: "Small and quick",
    source: "models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    bytes: 491_400_064,
  },
  {
    id: "coder-1.5b",
    name: "Qwen2.5-Coder 1.5B",
    about: "Better answers, slower",
    source: "models/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    bytes: 1_117_320_768,
  },
  {
    id: "r1-1.5b",
    name: "DeepSeek-R1-Distill-Qwen 1.5B",
    about: "Thinks before it answers; from Hugging Face, about 1.1 GB",
    source: "hf:unsloth/DeepSeek-R1-Distill-Qwen-1.5B-GGUF/DeepSeek-R1-Distill-Qwen-1.5B-Q4_K_M.gguf",
    bytes: null,
  },
  { id: "custom", name: "Another address", about: "A GGUF file on the web", source: null, bytes: null },
  { id: "file", name: "A file", about: "A GGUF file on this device", source: null, bytes: null },
];

/** The offer that a kept source belongs to: one of the list, or an address of the user's own. */
export function offerOf(source: string | undefined): string {
  if (source === undefined) return "coder-0.5b";
  return OFFERS.find((offer) => offer.source === source)?.id ?? "custom";
}
