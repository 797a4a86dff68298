// The chat: a conversation in memory, settings, and what each answer cost.
import { html, useEffect, useRef, useState } from "/page/vendor/htm-preact.js";
import { percent, seconds, short, tokens } from "/page/figures.js";
import { markdown } from "/page/markdown.js";
import { talk } from "/page/talk.js";

const SAID = { waiting: "waiting for the first token", writing: "writing", stopped: "stopped", failed: "failed" };

function Facts({ answer }) {
  const { usage } = answer;
  const facts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const share = usage.prompt_tokens ? cached / usage.prompt_tokens : 0;
    facts.push(["Prompt", `${tokens(usage.prompt_tokens)} tokens`]);
    facts.push(["Reused", `${tokens(cached)} (${percent(share)})`], ["Computed", tokens(usage.prompt_tokens - cached)]);
    facts.push(["Answer", `${tokens(usage.completion_tokens)} tokens`]);
  }
  if (answer.ttft !== undefined) facts.push(["First token", seconds(answer.ttft)]);
  if (answer.speed !== undefined) facts.push(["Speed", `${short(answer.speed)} tok/s`]);
  if (usage?.attempts > 1) facts.push(["Attempts", usage.attempts]);
  if (answer.finish && answer.finish !== "stop") facts.push(["Ended by", answer.finish]);
  facts.push(["Model", answer.model]);
  return html`<dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

function Answer({ answer }) {
  const busy = answer.state === "waiting" || answer.state === "writing";
  return html`<article class="message assistant" aria-label="Answer" aria-busy=${busy}>
    ${answer.reasoning && html`<details class="reasoning"><summary>Reasoning</summary><div class="said">${answer.reasoning}</div></details>`}
    <div class="text">${markdown(answer.content)}</div>
    ${answer.calls.filter(Boolean).map(
      (call) => html`<details class="call"><summary>Tool call <code>${call.name}</code></summary><pre tabindex="0">${call.arguments}</pre></details>`,
    )}
    ${SAID[answer.state] && html`<p class="state ${answer.state}">${SAID[answer.state]}</p>`}
    ${answer.error && html`<p class="error" role="alert">${answer.error}</p>`}
    ${!busy && html`<${Facts} answer=${answer} />`}
  </article>`;
}

function Settings({ value, change, completing }) {
  const set = (name) => (event) => change({ ...value, [name]: event.target.value });
  return html`<details class="settings">
    <summary>Settings</summary>
    ${!completing && html`<label>System prompt <textarea rows="3" value=${value.system} onInput=${set("system")}></textarea></label>`}
    <div class="pair">
      <label>Temperature <input type="number" min="0" max="2" step="0.1" placeholder="model's" value=${value.temperature} onInput=${set("temperature")} /></label>
      <label>Most tokens <input type="number" min="1" step="1" placeholder="what fits" value=${value.maxTokens} onInput=${set("maxTokens")} /></label>
    </div>
  </details>`;
}

// Answers change faster than a screen: only the last state before each frame is drawn.
function useFrames(draw) {
  const waiting = useRef(null);
  return (value) => {
    if (waiting.current === null) requestAnimationFrame(() => {
      const latest = waiting.current;
      waiting.current = null;
      draw(latest);
    });
    waiting.current = value;
  };
}

const LOOK_MS = 1000;
const fresh = () => `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
const forModel = (message) => ({ role: message.role, content: message.content });

export function Chat({ hidden }) {
  const [models, setModels] = useState([]);
  const [model, setModel] = useState("");
  const [messages, setMessages] = useState([]);
  const [open, setOpen] = useState(null);
  const [draft, setDraft] = useState("");
  const [settings, setSettings] = useState({ system: "", temperature: "", maxTokens: "" });
  const [told, setTold] = useState("");
  const [loading, setLoading] = useState(null); // unknown at first
  const [completing, setCompleting] = useState(false);
  const conversation = useRef(fresh());
  const abort = useRef(null);
  const log = useRef(null);
  // A frame may be drawn late, when the next answer is already asked for.
  const show = useFrames(([asked, answer]) => abort.current === asked && setOpen(answer));

  useEffect(() => {
    let again = 0;
    async function look() {
      const response = await fetch("/v1/models");
      if (response.status === 503) {
        setLoading(true);
        again = setTimeout(ask, LOOK_MS);
        return;
      }
      const { data } = await response.json();
      setModels(data.map(({ id }) => id));
      setModel(data[0]?.id ?? "");
      setLoading(false);
    }
    const ask = () => look().catch(() => setTold("The list of models cannot be read."));
    ask();
    return () => clearTimeout(again);
  }, []);

  useEffect(() => {
    const box = log.current;
    if (box && box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
  });

  async function send() {
    const text = completing ? draft : draft.trim();
    if (!text.trim() || abort.current || loading !== false) return;
    const asked = [...messages, { role: "user", content: text }];
    const own = (abort.current = new AbortController());
    setMessages(asked);
    setDraft("");
    setTold("The answer is being written.");
    setOpen({ role: "assistant", content: "", reasoning: "", calls: [], state: "waiting", model, error: "" });
    const past = asked.filter((message) => message.role === "user" || message.content).map(forModel);
    const say = (goOn) => talk({
      model, messages: past, settings, conversation: conversation.current, completing: goOn, signal: own.signal, changed: (answer) => show([own, answer]),
    });
    let answer = await say(completing);
    if (answer.code === "no_chat_template") {
      setCompleting(true);
      answer = await say(true);
    }
    abort.current = null;
    setOpen(null);
    setMessages([...asked, answer]);
    setTold(answer.state === "failed" ? "The answer failed." : `Answer: ${answer.content.slice(0, 2000)}`);
  }

  function restart() {
    abort.current?.abort();
    conversation.current = fresh();
    setMessages([]);
    setTold("New conversation.");
  }

  function keys(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "Escape") abort.current?.abort();
  }

  const shown = open ? [...messages, open] : messages;
  return html`<section id="chat" class="chat" role="tabpanel" aria-labelledby="tab-chat" hidden=${hidden}>
    <div class="bar">
      <label class="model">Model <select value=${model} onChange=${(event) => (setModel(event.target.value), setCompleting(false))}>
        ${models.map((name) => html`<option value=${name}>${name}</option>`)}
      </select></label>
      <button type="button" onClick=${restart} disabled=${!!open || !shown.length}>New conversation</button>
    </div>
    <${Settings} value=${settings} change=${setSettings} completing=${completing} />
    ${completing && html`<p class="note completing">This model has no chat template, so it cannot chat: it goes on with the text that you write.</p>`}
    <div class="log" ref=${log} role="log" aria-live="off" aria-label="Conversation" tabindex="0">
      ${!shown.length && loading && html`<p class="hint loading">The model is being loaded. The tab Rack shows its ranks as they come up.</p>`}
      ${!shown.length && loading === false && html`<p class="hint">Ask something. Ask again, and see how much of the prompt is not computed a second time.</p>`}
      ${shown.map((message) => message.role === "user"
        ? html`<article class="message user" aria-label="You"><div class="said">${message.content}</div></article>`
        : html`<${Answer} answer=${message} />`)}
    </div>
    <form class="ask" onSubmit=${(event) => (event.preventDefault(), send())}>
      <label class="unseen" for="draft">Message</label>
      <textarea id="draft" rows="2" placeholder=${completing ? "Text to go on with" : "Message"} value=${draft} onInput=${(event) => setDraft(event.target.value)} onKeyDown=${keys}></textarea>
      ${open
        ? html`<button type="button" class="main" onClick=${() => abort.current?.abort()}>Stop</button>`
        : html`<button class="main" disabled=${loading !== false || !draft.trim()}>Send</button>`}
    </form>
    <p class="unseen" role="status">${told}</p>
  </section>`;
}
