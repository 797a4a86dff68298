// The rack at work: ranks, what moves between them, and how well it goes. Fed by the server's events.
import { html, useEffect, useRef, useState } from "/page/vendor/htm-preact.js";
import { bytes, percent, round, seconds, short, tokens } from "/page/figures.js";
import { Point } from "/page/point.js";
import { Series } from "/page/series.js";

const MAX_SAMPLES = 300;

// The state of the feed. Frames come twice a second, a sample every two; EventSource asks again by itself when it breaks.
export function useFeed(signedIn) {
  const [feed, setFeed] = useState({ samples: [], frame: null, curve: "", frontier: [], live: false });
  useEffect(() => {
    const source = new EventSource("/page/feed");
    source.addEventListener("begin", (event) => {
      const { samples, curve, frontier, signed_in } = JSON.parse(event.data);
      signedIn(signed_in);
      setFeed((old) => ({ ...old, samples, curve, frontier, live: true }));
    });
    source.addEventListener("frame", (event) => {
      const frame = JSON.parse(event.data);
      setFeed((old) => {
        const fresh = frame.sample && frame.sample.t !== old.samples.at(-1)?.t;
        const samples = fresh ? [...old.samples, frame.sample].slice(-MAX_SAMPLES) : old.samples;
        return { ...old, samples, frame, live: true };
      });
    });
    source.addEventListener("error", () => setFeed((old) => ({ ...old, live: false })));
    return () => source.close();
  }, []);
  return feed;
}

function Ranks({ role, ranks }) {
  const running = ranks.reduce((sum, rank) => sum + rank.running, 0);
  const queued = ranks.reduce((sum, rank) => sum + rank.queued, 0);
  return html`<div class="ranks" tabindex="0" role="region" aria-label=${`${role} ranks`}>
    <table>
      <caption>${role} <span>${running} running, ${queued} queued</span></caption>
      <thead><tr><th scope="col">Rank</th><th scope="col">State</th><th scope="col">Running</th><th scope="col">Queued</th><th scope="col">KV in use</th></tr></thead>
      <tbody>${ranks.map((rank) => {
        const [used, cached, total] = rank.kv ?? [0, 0, 0];
        const again = rank.restarts ? ` (${rank.restarts} restarts)` : "";
        return html`<tr key=${rank.rank}>
          <th scope="row">${rank.rank}</th>
          <td class="state-${rank.state}"><i aria-hidden="true"></i>${rank.state}${again}</td>
          <td>${rank.running}</td><td>${rank.queued}</td>
          <td class="kv">${total
            ? html`<svg viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect class="all" width="100" height="8" /><rect class="cached" width=${(100 * cached) / total} height="8" /><rect class="used" width=${(100 * used) / total} height="8" /></svg>${percent(used / total)}`
            : "–"}</td>
        </tr>`;
      })}</tbody>
    </table>
  </div>`;
}

const FLOWS = [
  { kind: "push", path: "M150 44 H310", x: 231, y: 34, anchor: "middle", said: "prefill to decode" },
  { kind: "fetch", path: "M198 152 C150 146 112 124 112 80", x: 158, y: 118, anchor: "start", said: "pool to prefill" },
  { kind: "spill", path: "M62 76 C62 150 120 178 194 178", x: 192, y: 200, anchor: "end", said: "prefill to pool" },
];

function Moving({ frame }) {
  const { pool, flows } = frame;
  const share = pool?.total ? pool.cached / pool.total : null;
  const told = FLOWS.map(({ kind, said }) => `${said} ${bytes(flows[kind].bytes)}`).join(", ");
  return html`<figure class="chart moving">
    <figcaption><b>KV moving</b> <span>finished transfers, last two seconds</span></figcaption>
    <svg viewBox=${pool ? "0 0 460 206" : "0 0 460 88"} role="img" aria-label=${`KV moving: ${told}`}>
      <defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerUnits="userSpaceOnUse" markerWidth="10" markerHeight="10" orient="auto"><path d="M0 0 L8 4 L0 8 Z" /></marker></defs>
      ${FLOWS.filter(({ kind }) => pool || kind === "push").map(({ kind, path, x, y, anchor, said }) => {
        const { transfers, bytes: rate } = flows[kind];
        return html`<g class=${transfers ? "flow busy" : "flow"} key=${kind}>
          <title>${said}</title><path d=${path} marker-end="url(#tip)" />
          <text x=${x} y=${y} text-anchor=${anchor}>${kind} ${transfers ? `${round(transfers)}/s, ${bytes(rate)}` : "idle"}</text>
        </g>`;
      })}
      <g class="place"><rect x="24" y="14" width="124" height="60" rx="8" /><text x="86" y="40" text-anchor="middle">Prefill</text><text class="small" x="86" y="58" text-anchor="middle">${count(frame, "prefill")}</text></g>
      <g class="place"><rect x="314" y="14" width="124" height="60" rx="8" /><text x="376" y="40" text-anchor="middle">Decode</text><text class="small" x="376" y="58" text-anchor="middle">${count(frame, "decode")}</text></g>
      ${pool && html`<g class="place"><rect x="200" y="134" width="104" height="58" rx="8" /><text x="252" y="159" text-anchor="middle">Pool</text><text class="small" x="252" y="177" text-anchor="middle">${percent(share)} full</text></g>`}
    </svg>
    ${pool && html`<p class="note">The pool holds ${tokens(pool.cached)} of ${tokens(pool.total)} blocks. Lookups found ${tokens(pool.hits)} and missed ${tokens(pool.misses)}.</p>`}
  </figure>`;
}

function count(frame, role) {
  const ranks = frame.ranks.filter((rank) => rank.role === role);
  return `${ranks.filter((rank) => rank.state === "up").length} of ${ranks.length} up`;
}

const KINDS = [
  { name: "Cached input", color: "--cached", get: (sample) => sample.cached },
  { name: "Uncached input", color: "--uncached", get: (sample) => sample.uncached },
  { name: "Output", color: "--output", get: (sample) => sample.output, dash: [6, 3] },
];
const two = (name, colors) => [
  { name: "p50", color: colors, get: (sample) => sample[name]?.[0] ?? null },
  { name: "p90 (slow tail)", color: "--tail", get: (sample) => sample[name]?.[1] ?? null, dash: [6, 3] },
];
const HIT = [{ name: "hit rate", color: "--cached", get: (sample) => sample.hit }];
const TTFT = two("ttft", "--uncached");
const SPEED = two("speed", "--uncached");

export function Rack({ hidden, feed, look }) {
  const { samples, frame, live } = feed;
  const now = samples.at(-1);
  const was = useRef("");
  const [told, setTold] = useState("");
  const down = frame ? frame.ranks.filter((rank) => rank.state !== "up").map((rank) => `${rank.rank} is ${rank.state}`).join(", ") : "";
  useEffect(() => {
    if (frame && down !== was.current) setTold(down || "All ranks are up.");
    was.current = down;
  }, [down]);
  if (!frame) return html`<section id="rack" role="tabpanel" aria-labelledby="tab-rack" hidden=${hidden}><p class="hint">Waiting for the rack.</p></section>`;
  const pair = (value, write) => (value ? `p50 ${write(value[0])}, p90 ${write(value[1])}` : "none in the last minute");
  const rates = `${short(now?.cached ?? 0)} cached, ${short(now?.uncached ?? 0)} uncached, ${short(now?.output ?? 0)} output`;
  const common = { samples, look };
  return html`<section id="rack" class="rack" role="tabpanel" aria-labelledby="tab-rack" hidden=${hidden}>
    ${!live && html`<p class="error" role="alert">The connection is broken; what is shown is old.</p>`}
    <p class="unseen" role="status">${told}</p>
    <div class="cards">
      <${Moving} frame=${frame} />
      <${Point} samples=${samples} frontier=${feed.frontier} curve=${feed.curve} />
    </div>
    <div class="cards">
      <${Ranks} role="Prefill" ranks=${frame.ranks.filter((rank) => rank.role === "prefill")} />
      <${Ranks} role="Decode" ranks=${frame.ranks.filter((rank) => rank.role === "decode")} />
    </div>
    <p class="note">Bars: blocks that running requests use, over blocks in the cache, over all.</p>
    <div class="cards">
      <${Series} ...${common} title="Tokens/s" told=${rates} lines=${KINDS} format=${round} />
      <${Series} ...${common} title="Hit rate" told=${percent(now?.hit)} lines=${HIT} format=${percent} top=${1} />
      <${Series} ...${common} title="Time to first token" told=${pair(now?.ttft, seconds)} lines=${TTFT} format=${seconds} />
      <${Series} ...${common} title="Tokens/s/user" told=${pair(now?.speed, short)} lines=${SPEED} format=${round} />
    </div>
  </section>`;
}
