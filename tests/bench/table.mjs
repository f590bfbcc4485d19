// The benchmark's table: medians, each of ours beside the better wllama with as many threads, and the share of what the
// memory allows (tokens per second at which every weight byte is read once per token).

export const show = (value, digits = 1) => (value === null || value === undefined ? "-" : value.toFixed(digits));
export const times = (ours, theirs) => (ours === null || theirs === null ? "-" : `${(ours / theirs).toFixed(2)}×`);

/** Lines of cells, the first `left` columns aligned to the left. */
export function printColumns(lines, left) {
  const widths = lines[0].map((_, i) => Math.max(...lines.map((line) => line[i].length)));
  for (const line of lines) console.log(line.map((cell, i) => (i < left ? cell.padEnd(widths[i]) : cell.padStart(widths[i]))).join("  "));
}

export function printTable({ machine, browser, model, rows, readGBps, contexts }) {
  console.log(`\n${model.file} · ${browser} · ${machine.cpu}, ${machine.cores} cores`);
  console.log(`medians; tok/s, s, MB; "×" is against the better wllama with as many threads; limit ${[1, 2].map((n) => `${((1e9 * readGBps[n]) / model.bytesPerToken).toFixed(1)} tok/s (${readGBps[n].toFixed(1)} GB/s, ${n} thread${n > 1 ? "s" : ""})`).join(", ")}\n`);
  const best = (threads, pick) => {
    const found = rows.filter((row) => row.engine.startsWith("wllama") && row.threads === threads).map(pick).filter((rate) => rate !== null);
    return found.length === 0 ? null : Math.max(...found);
  };
  const head = ["engine", "tier", "threads", "p32", "p128", "×", "p512", "×", "decode", "×", "of limit", "load", "again", "2nd turn", "wasm MB", "RSS MB", "others"];
  const lines = rows.map((row) => {
    const ours = row.engine === "qandle";
    const ratio = (pick) => (ours ? times(pick(row), best(row.threads, pick)) : "");
    return [
      row.engine, row.tier ?? "", String(row.threads),
      show(row.prefill[32]), show(row.prefill[128]), ratio((r) => r.prefill[128]), show(row.prefill[512]), ratio((r) => r.prefill[512]),
      show(row.decode), ratio((r) => r.decode),
      row.decode === null ? "-" : `${((100 * row.decode * model.bytesPerToken) / (1e9 * readGBps[row.threads])).toFixed(0)} %`,
      show(row.loadMs.cold === null ? null : row.loadMs.cold / 1000), show(row.loadMs.warm === null ? null : row.loadMs.warm / 1000),
      show(row.secondTurnTtftMs === null ? null : row.secondTurnTtftMs / 1000, 2),
      show(row.memoryBytes === null ? null : row.memoryBytes / 1e6, 0), show(row.rssBytes === null ? null : row.rssBytes / 1e6, 0), show(row.foreignCores, 2),
    ];
  });
  printColumns([head, ...lines], 2);
  beside("native llama.cpp", rows, rows.filter((row) => row.engine === "llama.cpp-native"));
  for (const row of rows.filter(({ profile }) => profile)) {
    for (const phase of ["decode", "prefill"]) printProfile(`${row.engine} ${row.tier}, ${row.threads} thread${row.threads > 1 ? "s" : ""}, ${phase}`, row.profile[phase]);
  }
  for (const { tier, threads, attentionGflops, decode } of contexts) {
    console.log(`${tier}, ${threads} thread: attention in the prefill of 2048 tokens ${show(attentionGflops)} GFLOP/s; decode ${show(decode[128])} tok/s after 128 tokens, ${show(decode[4096])} after 4096 (a token costs ${times(decode[128], decode[4096])})`);
  }
  console.log("");
}

/** Each of ours beside one more engine with as many threads. */
function beside(name, rows, theirs) {
  for (const row of rows.filter(({ engine }) => engine === "qandle")) {
    const other = theirs.find(({ threads }) => threads === row.threads);
    if (other === undefined) continue;
    const prefill = [128, 512].filter((length) => row.prefill[length] !== null).map((length) => `prefill ${length} ${times(row.prefill[length], other.prefill[length])}`);
    console.log(`beside ${name}: ${row.tier}, ${row.threads} thread${row.threads > 1 ? "s" : ""}: decode ${times(row.decode, other.decode)}, ${prefill.join(", ")}`);
  }
}

/** Where the time went: per kernel its share, GB/s of weights or cache read, and GOP/s. */
function printProfile(title, { decode, tokens, wallMs, outsideKernelsMs, kernels }) {
  const parts = kernels.sort((a, b) => b.ms - a.ms).map(({ name, ms, bytes, ops }) => `${name} ${((100 * ms) / wallMs).toFixed(0)} % (${(bytes / ms / 1e6).toFixed(1)} GB/s, ${(ops / ms / 1e6).toFixed(0)} GOP/s)`);
  // Between two tokens as the page sees them there are sampling, text and messages too.
  const inside = kernels.reduce((sum, { ms }) => sum + ms, 0) / tokens;
  const seen = decode === null ? "" : `, ${(1000 / decode).toFixed(2)} ms between two on the page, of that outside kernels ${(100 - (inside * decode) / 10).toFixed(1)} %`;
  console.log(`${title}: ${(wallMs / tokens).toFixed(2)} ms a token, outside kernels ${((100 * outsideKernelsMs) / wallMs).toFixed(1)} %${seen}; ${parts.join(", ")}`);
}
