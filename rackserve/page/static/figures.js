// How numbers are written.
export const tokens = (n) => Math.round(n).toLocaleString("en");

export function short(n) {
  if (n === null || n === undefined || !Number.isFinite(n)) return "–";
  if (n === 0) return "0";
  const size = Math.abs(n);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= unit) return `${(n / unit).toPrecision(3)} ${letter}`;
  return size >= 100 ? n.toFixed(0) : size >= 1 ? n.toPrecision(3) : n.toPrecision(2);
}

// For axes: without zeros that say nothing.
export const round = (n) => short(n).replace(/\.0+(?=\D|$)|(\.\d*[1-9])0+(?=\D|$)/, "$1");

export const bytes = (n) => `${short(n)}${/[kMGT]$/.test(short(n)) ? "" : " "}B/s`;
export const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(0)} %`);

export function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s === 0) return "0";
  return s < 1 ? `${(1000 * s).toPrecision(3)} ms` : `${s.toPrecision(3)} s`;
}
