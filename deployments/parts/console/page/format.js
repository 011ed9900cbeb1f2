// Numbers and times as people read them.

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const precise = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const significant = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const count = (n) => plain.format(n);
export const rate = (n) => (n >= 10 ? plain : precise).format(n);
export const percent = (fraction) => (fraction > 0 && fraction < 0.0005 ? "< 0.1 %" : `${precise.format(100 * fraction)} %`);
export const money = (amount, currency) => `${(amount === 0 ? plain : significant).format(amount)} ${currency}`;
export const time = (seconds) => clock.format(new Date(1000 * seconds));

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.001) return `${rate(1e6 * seconds)} µs`;
  return seconds < 1 ? `${rate(1000 * seconds)} ms` : `${precise.format(seconds)} s`;
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i++) n /= 1024;
  return `${rate(n)} ${units[i]}`;
}

// The last part of a replica's id, which is what tells it from others of its pool.
export const shortName = (id) => id.slice(id.lastIndexOf("-") + 1);
