// Numbers as people read them.

const decimals = (digits: number) => new Intl.NumberFormat(undefined, { maximumFractionDigits: digits });

/** Bytes in decimal units, as shops and file managers count them. */
export function bytes(count: number): string {
  if (count >= 1e9) return `${decimals(2).format(count / 1e9)} GB`;
  if (count >= 1e6) return `${decimals(0).format(count / 1e6)} MB`;
  return `${decimals(0).format(Math.ceil(count / 1e3))} kB`;
}

export function seconds(count: number): string {
  if (count >= 90) return `${Math.round(count / 60)} min`;
  return `${Math.max(1, Math.round(count))} s`;
}

export function rate(tokensPerSecond: number): string {
  return `${decimals(1).format(tokensPerSecond)} tok/s`;
}
