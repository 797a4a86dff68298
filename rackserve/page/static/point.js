// The operating point: what the rack gives now, where it came from, and a curve behind it.
import { html } from "/page/vendor/htm-preact.js";
import { round, short } from "/page/figures.js";

const WIDTH = 460;
const HEIGHT = 260;
const LEFT = 58;
const BOTTOM = 38;
const TRAIL = 90;

// Round numbers from 0 to beyond `most`, four or five of them.
function ticks(most) {
  const size = 10 ** Math.floor(Math.log10(most / 4));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * size).find((n) => n * 4 >= most);
  return Array.from({ length: Math.ceil(most / step) + 1 }, (_, n) => n * step);
}

export function Point({ samples, frontier, curve }) {
  const trail = samples.slice(-TRAIL).filter((sample) => sample.point).map((sample) => sample.point);
  const all = [...trail, ...frontier];
  const now = samples.at(-1)?.point ?? null;
  const xs = ticks(1.08 * Math.max(...all.map(([x]) => x), 1));
  const ys = ticks(1.08 * Math.max(...all.map(([, y]) => y), 1));
  const x = (value) => LEFT + (value / xs.at(-1)) * (WIDTH - LEFT - 20);
  const y = (value) => HEIGHT - BOTTOM - (value / ys.at(-1)) * (HEIGHT - BOTTOM - 10);
  const told = now ? `${short(now[0])} tok/s/user at ${short(now[1])} tok/s per rank` : "no request has finished in the last minute";
  return html`<figure class="chart">
    <figcaption><b>Operating point</b> <span>${told}</span></figcaption>
    <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-label=${`Operating point: ${told}`}>
      <g class="grid">
        ${xs.map((n) => html`<line x1=${x(n)} x2=${x(n)} y1=${y(0)} y2=${y(ys.at(-1))} /><text x=${x(n)} y=${HEIGHT - BOTTOM + 15} text-anchor="middle">${round(n)}</text>`)}
        ${ys.map((n) => html`<line x1=${x(0)} x2=${x(xs.at(-1))} y1=${y(n)} y2=${y(n)} /><text x=${LEFT - 6} y=${y(n) + 4} text-anchor="end">${round(n)}</text>`)}
      </g>
      <text x=${(LEFT + WIDTH) / 2} y=${HEIGHT - 4} text-anchor="middle">tok/s/user, slow tail (p90)</text>
      <text transform="translate(12 ${(HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">tok/s per rank</text>
      ${frontier.length > 0 && html`<polyline class="frontier" points=${frontier.map(([a, b]) => `${x(a)},${y(b)}`).join(" ")} />`}
      ${trail.map(([a, b], n) => html`<circle class="trail" cx=${x(a)} cy=${y(b)} r="2.5" opacity=${0.15 + (0.6 * (n + 1)) / trail.length} />`)}
      ${now && html`<circle class="now" cx=${x(now[0])} cy=${y(now[1])} r="6" />`}
    </svg>
    <p class="note">Requests that finished in the last minute, cached input included; the trail is three minutes.${frontier.length > 0 && ` Dashed: ${curve}.`}</p>
  </figure>`;
}
