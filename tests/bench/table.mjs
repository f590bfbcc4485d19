// The benchmark's table: medians, each of ours beside the better wllama with as many threads, and the share of what the
// memory allows (tokens per second at which every weight byte is read once per token).

const show = (value, digits = 1) => (value === null || value === undefined ? "-" : value.toFixed(digits));
const times = (ours, theirs) => (ours === null || theirs === null ? "-" : `${(ours / theirs).toFixed(2)}×`);

export function printTable({ machine, browser, model, rows, readGBps }) {
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
  const widths = head.map((title, i) => Math.max(title.length, ...lines.map((line) => line[i].length)));
  for (const line of [head, ...lines]) console.log(line.map((cell, i) => (i < 2 ? cell.padEnd(widths[i]) : cell.padStart(widths[i]))).join("  "));
  console.log("");
}
