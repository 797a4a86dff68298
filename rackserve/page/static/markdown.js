// A small part of Markdown as elements of preact. Text only ever becomes text nodes: no HTML is parsed, links lead to http(s).
import { html } from "/page/vendor/htm-preact.js";

const INLINE = /(`+)([^`]+?)\1(?!`)|\*\*(?=\S)([^*]+?)\*\*|(?<![\w*])\*(?=[^\s*])([^*]+?)\*(?![\w*])|\[([^\][]+)\]\(([^()\s]+)\)/;
const BLOCK = /^(```|~~~|#{1,6} |\s*[-*+] |\s*\d{1,9}[.)] |> |\s*$|(-{3,}|\*{3,})\s*$)/;

export function inline(text) {
  const parts = [];
  while (text) {
    const found = INLINE.exec(text);
    if (!found) break;
    const [all, , code, bold, italic, label, target] = found;
    if (found.index) parts.push(text.slice(0, found.index));
    if (code !== undefined) parts.push(html`<code>${code}</code>`);
    else if (bold !== undefined) parts.push(html`<strong>${inline(bold)}</strong>`);
    else if (italic !== undefined) parts.push(html`<em>${inline(italic)}</em>`);
    else if (/^https?:\/\//i.test(target))
      parts.push(html`<a href=${target} target="_blank" rel="noopener noreferrer">${label}</a>`);
    else parts.push(all);
    text = text.slice(found.index + all.length);
  }
  if (text) parts.push(text);
  return parts;
}

function fenced(lines, at) {
  const mark = lines[at].slice(0, 3);
  let end = at + 1;
  while (end < lines.length && !lines[end].startsWith(mark)) end++;
  return [html`<pre tabindex="0"><code>${lines.slice(at + 1, end).join("\n")}</code></pre>`, end + 1];
}

function list(lines, at) {
  const ordered = /^\s*\d/.test(lines[at]);
  const mark = ordered ? /^\s*\d{1,9}[.)] / : /^\s*[-*+] /;
  const items = [];
  let end = at;
  for (; end < lines.length; end++) {
    if (mark.test(lines[end])) items.push([lines[end].replace(mark, "")]);
    else if (/^\s+\S/.test(lines[end])) items.at(-1).push(lines[end].trim());
    else break;
  }
  const inner = items.map((item) => html`<li>${inline(item.join("\n"))}</li>`);
  const start = ordered ? parseInt(lines[at], 10) : undefined;
  return [ordered ? html`<ol start=${start}>${inner}</ol>` : html`<ul>${inner}</ul>`, end];
}

function plain(lines, at) {
  let end = at + 1;
  while (end < lines.length && !BLOCK.test(lines[end])) end++;
  return [html`<p>${inline(lines.slice(at, end).join("\n"))}</p>`, end];
}

export function markdown(text) {
  const lines = text.split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    let block = null;
    if (/^\s*$/.test(line)) at++;
    else if (/^(```|~~~)/.test(line)) [block, at] = fenced(lines, at);
    else if (/^#{1,6} /.test(line)) [block, at] = [html`<p class="heading">${inline(line.replace(/^#+ /, ""))}</p>`, at + 1];
    else if (/^(-{3,}|\*{3,})\s*$/.test(line)) [block, at] = [html`<hr />`, at + 1];
    else if (/^> /.test(line)) [block, at] = [html`<blockquote>${inline(line.slice(2))}</blockquote>`, at + 1];
    else if (/^\s*([-*+]|\d{1,9}[.)]) /.test(line)) [block, at] = list(lines, at);
    else [block, at] = plain(lines, at);
    if (block) blocks.push(block);
  }
  return blocks;
}
