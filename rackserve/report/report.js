"use strict";
// The page is complete without this script; it adds what a reader can do: point, choose, save.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  return made;
}

// ---- values under the pointer: the drawings' own <title>s, shown at once

function startTips() {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  document.addEventListener("pointerover", (event) => {
    const mark = event.target.closest("svg *");
    const title = mark && [...mark.children].find((child) => child.tagName === "title");
    if (title) {
      mark.dataset.tip = title.textContent;
      title.remove(); // or the browser shows it too, later
    }
    tip.hidden = !(mark && mark.dataset.tip);
    if (!tip.hidden) tip.textContent = mark.dataset.tip;
  });
  document.addEventListener("pointermove", (event) => {
    if (tip.hidden) return;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 16 + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${below ? event.clientY + 16 : event.clientY - tip.offsetHeight - 10}px`;
  });
}

// ---- the frontier by a chosen throughput

function showMeasure(measure) {
  for (const panel of document.querySelectorAll(".panel")) panel.classList.toggle("other", panel.dataset.measure !== measure);
}

function startChoice() {
  for (const input of document.querySelectorAll('input[name="measure"]')) {
    input.addEventListener("change", () => showMeasure(input.value));
  }
}

// ---- tables as CSV: digits grouped for the eye and signs after them are taken off numbers

function csvCell(text) {
  const plain = text.trim().replace(/^[–]$/, "");
  const number = plain.replace(/,/g, "").replace(/×$/, "");
  const value = /^-?[\d.]+(e[+-]?\d+)?$/i.test(number) ? number : plain;
  return /[",\n]/.test(value) ? `"${value.replace(/"/g, '""')}"` : value;
}

function tableCsv(table) {
  const lines = [];
  let section = "";
  const sections = table.querySelector("tr.section") !== null;
  for (const row of table.rows) {
    const cells = [...row.cells].map((cell) => csvCell(cell.textContent));
    if (row.classList.contains("section")) {
      section = cells[0];
      continue;
    }
    if (sections) cells.unshift(row.parentElement.tagName === "THEAD" ? "section" : section);
    lines.push(cells.join(","));
  }
  return `${lines.join("\r\n")}\r\n`;
}

function startDownloads() {
  for (const table of document.querySelectorAll("table[data-name]")) {
    const link = document.createElement("a");
    link.className = "csv";
    link.textContent = "CSV";
    link.download = `${table.dataset.name.replace(/\W+/g, "-")}.csv`;
    link.href = "#";
    link.title = "save this table";
    link.addEventListener("click", () => {
      link.href = `data:text/csv;charset=utf-8,${encodeURIComponent("\ufeff" + tableCsv(table))}`;
    });
    const frame = table.parentElement, above = frame.previousElementSibling;
    if (above && /^H[23]$/.test(above.tagName)) above.append(link);
    else frame.before(link);
  }
}

// ---- the waterfall of a session

const WIDE = 1180, LEFT = 8, ROW = 15, TEXT = 330;

function describe(request) {
  const [name, due, sent, first, end, prompt, cached, output, error] = request;
  const lines = [name, `${prompt.toLocaleString("en")} in, ${cached.toLocaleString("en")} of them cached; ${output.toLocaleString("en")} out`];
  lines.push(`sent at ${sent.toFixed(3)} s, ${((sent - due) * 1000).toFixed(0)} ms after its plan`);
  if (first !== null) lines.push(`first token after ${((first - sent) * 1000).toFixed(0)} ms`);
  lines.push(error ? `failed: ${error}` : `over after ${(end - sent).toFixed(3)} s`);
  return lines.join("\n");
}

function niceStep(span, count) {
  const raw = span / count || 1, unit = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * unit).find((step) => step >= raw * 0.999);
}

function bar(svg, look, from, to, y, tip) {
  const rect = element("rect", { class: look, x: from.toFixed(1), y, width: Math.max(0.8, to - from).toFixed(1), height: ROW - 5 });
  rect.append(element("title", {}, tip));
  svg.append(rect);
}

function drawWaterfall(place, requests) {
  const zero = Math.min(...requests.map((request) => request[1]));
  const end = Math.max(...requests.map((request) => request[4]));
  const span = end - zero || 1, width = WIDE - LEFT - TEXT;
  const at = (time) => LEFT + ((time - zero) / span) * width;
  const height = requests.length * ROW + 40;
  const svg = element("svg", { viewBox: `0 0 ${WIDE} ${height}`, role: "img", "aria-label": "requests of the session" });
  const step = niceStep(span, 8), digits = Math.max(0, -Math.floor(Math.log10(step)));
  for (let time = 0; time <= span * 1.0001; time += step) {
    const x = at(zero + time).toFixed(1);
    svg.append(element("line", { class: "rule", x1: x, x2: x, y1: 0, y2: height - 36 }));
    svg.append(element("text", { x, y: height - 20, "text-anchor": time ? "middle" : "start" }, time.toFixed(digits)));
  }
  requests.forEach((request, row) => {
    const [, due, sent, first, over, prompt, cached, output, error] = request;
    const y = row * ROW + 3, tip = describe(request), shown = first === null ? over : first;
    if (sent > due) bar(svg, "w0", at(due), at(sent), y, tip);
    bar(svg, error && first === null ? "w2" : "t0", at(sent), at(shown), y, tip);
    if (first !== null) bar(svg, error ? "w2" : "t1", at(first), at(over), y, tip);
    const share = prompt ? ((100 * cached) / prompt).toFixed(0) : "0";
    const text = `${prompt.toLocaleString("en")} in, ${share}% cached, ${output.toLocaleString("en")} out${error ? ` · ${error}` : ""}`;
    svg.append(element("text", { class: "value", x: WIDE - TEXT + 14, y: y + ROW - 6 }, text));
  });
  svg.append(element("text", { class: "axis", x: LEFT + width / 2, y: height - 4, "text-anchor": "middle" }, "seconds of the session"));
  place.replaceChildren(svg);
}

function startWaterfall() {
  const data = document.getElementById("sessions"), choice = document.getElementById("session");
  if (!data) return;
  const runs = JSON.parse(data.textContent);
  const draw = () => {
    const [run, session] = choice.value.split("/").map(Number);
    drawWaterfall(document.getElementById("waterfall"), runs[run].sessions[session].requests);
  };
  choice.addEventListener("change", draw);
  draw();
}

startTips();
startChoice();
startDownloads();
startWaterfall();
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => (each.open = true)));
