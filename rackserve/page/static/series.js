// Figures over the last ten minutes, drawn by uPlot on a canvas; the caption says in words what stands now.
import { html, useEffect, useRef } from "/page/vendor/htm-preact.js";

const HEIGHT = 170;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function options(lines, width, format, top) {
  const axis = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
  const ago = (seconds) => (seconds === 0 ? "now" : `${Math.round(seconds / 60)} min`);
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    scales: { x: { time: false, range: [-600, 0] }, y: { range: (_, __, most) => [0, top ?? (most > 0 ? 1.1 * most : 1)] } },
    axes: [
      { ...axis, splits: () => [-600, -480, -360, -240, -120, 0], values: (_, at) => at.map(ago), size: 28 },
      { ...axis, values: (_, at) => at.map(format), size: 64 },
    ],
    series: [{}, ...lines.map(({ color, dash }) => ({ stroke: css(color), width: 2, dash, points: { show: false } }))],
  };
}

export function Series({ title, told, samples, lines, format, top, look }) {
  const box = useRef(null);
  const plot = useRef(null);
  const latest = samples.at(-1)?.t ?? 0;
  const data = [samples.map(({ t }) => t - latest), ...lines.map(({ get }) => samples.map((sample) => get(sample)))];

  useEffect(() => {
    const draw = () => {
      plot.current?.destroy();
      const width = Math.floor(box.current.clientWidth);
      plot.current = width ? new uPlot(options(lines, width, format, top), data, box.current) : null;
    };
    draw();
    const watch = new ResizeObserver(() => {
      const width = Math.floor(box.current?.clientWidth ?? 0);
      if (!plot.current) draw();
      else if (width && width !== plot.current.width) plot.current.setSize({ width, height: HEIGHT });
    });
    watch.observe(box.current);
    return () => (watch.disconnect(), plot.current?.destroy(), (plot.current = null));
  }, [look]);

  useEffect(() => plot.current?.setData(data), [latest, samples.length]);

  return html`<figure class="chart">
    <figcaption><b>${title}</b> <span>${told}</span></figcaption>
    <div ref=${box} class="canvas" role="img" aria-label=${`${title}, last ten minutes; now ${told}`}></div>
    ${lines.length > 1 && html`<ul class="legend">${lines.map(({ name, color, dash }) => html`<li><i class=${dash ? "dashed" : ""} style=${{ color: `var(${color})` }}></i>${name}</li>`)}</ul>`}
  </figure>`;
}
