// What is measured on the page, with the same clock for every engine: all times are taken on the page's main thread.
// Each engine is `{ load(), chat(messages, { maxTokens, turn }), close() }`.

const MODEL = "/models/model.gguf";
const CONTEXT = 1024;
// Never chosen, so that no answer ends before its tokens are counted.
const END_TOKENS = { 151643: -100, 151645: -100 };

let engine;

async function qandle({ tier, threads, contextLength = CONTEXT, fastImage, cache }) {
  const { load } = await import("/pkg/index.js");
  /** Sends a streamed request: its text, and what its last chunks say. */
  const send = async (completions, body, onToken) => {
    const stream = await completions.create({ temperature: 0, stream: true, stream_options: { include_usage: true }, return_tokens: true, ...body });
    const reply = { text: "", ids: [] };
    for await (const chunk of stream) {
      const { token_ids: ids = [], delta } = chunk.choices[0] ?? {};
      if (ids.length > 0) onToken(ids.length);
      reply.ids.push(...ids);
      reply.text += delta?.content ?? "";
      if (chunk.usage) Object.assign(reply, { promptTokens: chunk.usage.prompt_tokens, cachedTokens: chunk.usage.prompt_tokens_details.cached_tokens });
      reply.cached = chunk.qandle?.cached ?? reply.cached;
    }
    return reply;
  };
  const loaded = await load(MODEL, { tier, threads, contextLength, ...(fastImage === undefined ? {} : { fastImage }), ...(cache === undefined ? {} : { cache }) });
  let session = 0;
  return {
    count: (messages) => loaded.countTokens(messages),
    tokens: async (messages) => Array.from(await loaded.tokenize(await loaded.applyChatTemplate(messages), { special: true })),
    memory: () => loaded.info.memory.wasmBytes,
    runtime: loaded.info.runtime,
    load: loaded.info.load,
    profile: () => loaded.profile(),
    async complete(ids, maxTokens, onToken) {
      session += 1;
      await send(loaded.completions, { prompt: ids, max_tokens: maxTokens, session_id: `bench-${session}`, cache: "off", logit_bias: END_TOKENS }, onToken);
      await loaded.sessions.delete(`bench-${session}`);
    },
    async chat(messages, { maxTokens, turn }, onToken) {
      if (turn !== 2) session += 1;
      return await send(loaded.chat.completions, { messages, max_tokens: maxTokens, session_id: `bench-${session}`, cache: "off", logit_bias: END_TOKENS }, onToken);
    },
    request: (body, onToken) => send(loaded.chat.completions, body, onToken),
    metrics: () => loaded.metrics(),
    close: () => loaded.close(),
  };
}

// A peer keeps its memory to itself: its workers, which it makes out of text, note each memory that they see.
const NOTE_MEMORIES = `self.benchMemories = [];
{
  const Memory = WebAssembly.Memory;
  WebAssembly.Memory = new Proxy(Memory, { construct(target, options) {
    const memory = Reflect.construct(target, options);
    self.benchMemories.push(memory);
    return memory;
  } });
  for (const name of ["instantiate", "instantiateStreaming"]) {
    const original = WebAssembly[name];
    WebAssembly[name] = async (...options) => {
      const made = await original.apply(WebAssembly, options);
      self.benchMemories.push(...Object.values((made.instance ?? made).exports).filter((each) => each instanceof Memory));
      return made;
    };
  }
}
`;
function noteMemories() {
  const Original = window.Blob;
  window.Blob = class extends Original {
    constructor(parts, options) {
      super(options?.type === "text/javascript" ? [NOTE_MEMORIES, ...parts] : parts, options);
    }
  };
}

async function wllama2({ threads }) {
  noteMemories();
  const { Wllama } = await import("/wllama-2/index.js");
  const wllama = new Wllama(
    { "single-thread/wllama.wasm": "/wllama-2/single-thread/wllama.wasm", "multi-thread/wllama.wasm": "/wllama-2/multi-thread/wllama.wasm" },
    { suppressNativeLog: true },
  );
  await wllama.loadModelFromUrl(new URL(MODEL, location.href).href, { n_ctx: CONTEXT, n_batch: 512, n_threads: threads, cache_type_k: "f16", cache_type_v: "f16" });
  return {
    runtime: { threads: wllama.isMultithread() ? threads : 1 },
    async chat(messages, { maxTokens, turn }, onToken) {
      const text = await wllama.createChatCompletion(messages, { nPredict: maxTokens, sampling: { temp: 0 }, useCache: turn !== undefined, onNewToken: () => onToken(1) });
      return { text };
    },
    close: () => wllama.exit(),
  };
}

async function wllama3({ threads }) {
  noteMemories();
  const { Wllama } = await import("/wllama-3/index.js");
  const wllama = new Wllama({ default: "/wllama-3/wasm/wllama.wasm" }, { suppressNativeLog: true });
  const model = await wllama.modelManager.getModelOrDownload(new URL(MODEL, location.href).href);
  await wllama.loadModel(model, { n_ctx: CONTEXT, n_batch: 512, n_threads: threads, n_gpu_layers: 0, cache_type_k: "f16", cache_type_v: "f16" });
  return {
    runtime: { threads: wllama.isMultithread() ? threads : 1 },
    async chat(messages, { maxTokens, turn }, onToken) {
      let text = "";
      let timings = null;
      await wllama.createChatCompletion({
        messages, stream: true, max_tokens: maxTokens, temperature: 0, ignore_eos: true, cache_prompt: turn !== undefined,
        onData: (chunk) => {
          const piece = chunk.choices?.[0]?.delta?.content;
          timings = chunk.timings ?? timings;
          if (piece) { text += piece; onToken(1); }
        },
      });
      return { text, promptTokens: timings?.prompt_n, cachedTokens: timings?.cache_n };
    },
    close: () => wllama.exit(),
  };
}

const engines = { qandle, "wllama-2.3.1": wllama2, "wllama-3": wllama3 };

/** From the call to an engine that answers. */
window.loadEngine = async ({ name, ...options }) => {
  const began = performance.now();
  engine = await engines[name](options);
  return { loadMs: performance.now() - began, isolated: crossOriginIsolated, runtime: engine.runtime, load: engine.load };
};

/** Time to the first token, and tokens per second after it. */
window.chat = async (messages, options) => {
  const at = [];
  const began = performance.now();
  const reply = await engine.chat(messages, options, (tokens) => {
    const now = performance.now();
    for (let i = 0; i < tokens; i++) at.push(now);
  });
  const decodeMs = at.at(-1) - at[0];
  return { ...reply, tokens: at.length, ttftMs: at[0] - began, decode: at.length > 1 ? (1000 * (at.length - 1)) / decodeMs : null };
};

/** A chat request as it is: time to the first token and to the end, ms, its ids and its text. */
window.request = async (body) => {
  const began = performance.now();
  let first = null;
  const reply = await engine.request(body, () => {
    first ??= performance.now();
  });
  const ended = performance.now();
  return { ...reply, ttftMs: (first ?? ended) - began, totalMs: ended - began };
};

/** Decode speed after a prompt of token ids, and where the time went, by kernel. */
window.complete = async (ids, maxTokens) => {
  const at = [];
  const before = await engine.profile();
  await engine.complete(ids, maxTokens, (tokens) => {
    for (let i = 0; i < tokens; i++) at.push(performance.now());
  });
  const after = await engine.profile();
  const kernels = after.kernels.map((kernel) => {
    const old = before.kernels.find(({ name }) => name === kernel.name);
    return { ...kernel, ...Object.fromEntries(["calls", "ms", "bytes", "ops"].map((key) => [key, kernel[key] - (old?.[key] ?? 0)])) };
  });
  const less = (key) => after[key] - before[key];
  return {
    decode: at.length > 1 ? (1000 * (at.length - 1)) / (at.at(-1) - at[0]) : null,
    tokens: less("tokens"), wallMs: less("wallMs"), outsideKernelsMs: less("outsideKernelsMs"), kernels: kernels.filter(({ calls }) => calls > 0),
  };
};

window.metrics = () => engine.metrics();
window.count = (messages) => engine.count(messages);
window.tokens = (messages) => engine.tokens(messages);
window.memoryBytes = () => engine.memory?.() ?? null;
window.closeEngine = () => engine.close();

/** GB/s that wasm reads out of 256 MiB for each thread, far beyond any cache. */
window.bandwidth = async (threads) => {
  const part = 256 << 20;
  const memory = new WebAssembly.Memory({ initial: (threads * part) >> 16, maximum: 65536, shared: true });
  new Uint8Array(memory.buffer).fill(1);
  const module = await WebAssembly.compileStreaming(fetch("/wasm/bandwidth.wasm"));
  const ask = (worker, message) => new Promise((resolve, reject) => {
    worker.onmessage = ({ data }) => resolve(data);
    worker.onerror = (event) => reject(new Error(event.message));
    worker.postMessage(message);
  });
  const workers = Array.from({ length: threads }, (_, i) => ({ worker: new Worker("./bandwidth.js"), from: i * part, to: (i + 1) * part }));
  await Promise.all(workers.map(({ worker, from, to }) => ask(worker, { module, memory, from, to })));
  const passes = 12;
  const rates = [];
  for (let round = 0; round < 4; round++) {
    const times = await Promise.all(workers.map(({ worker, from, to }) => ask(worker, { from, to, passes })));
    rates.push((threads * part * passes) / Math.max(...times) / 1e6);
  }
  for (const { worker } of workers) worker.terminate();
  return Math.max(...rates);
};
