// The page: two tabs, the theme, and the way out.
import { html, render, useEffect, useState } from "/page/vendor/htm-preact.js";
import { Chat } from "/page/chat.js";
import { Rack, useFeed } from "/page/rack.js";

const TABS = [["chat", "Chat"], ["rack", "Rack"]];
const THEMES = ["system", "light", "dark"];
const here = () => (location.hash === "#rack" ? "rack" : "chat");

function remembered() {
  try {
    return THEMES.find((name) => name === localStorage.getItem("theme")) ?? "system";
  } catch {
    return "system"; // storage is off in this browser
  }
}

function apply(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // then it holds until the page is left
  }
}

// Which colours are shown, so that canvases are drawn again when they change.
function useTheme() {
  const [theme, setTheme] = useState(remembered);
  const [dark, setDark] = useState(matchMedia("(prefers-color-scheme: dark)").matches);
  useEffect(() => {
    const media = matchMedia("(prefers-color-scheme: dark)");
    media.addEventListener("change", () => setDark(media.matches));
  }, []);
  apply(theme);
  return [theme, setTheme, theme === "system" ? (dark ? "dark" : "light") : theme];
}

function Tabs({ tab }) {
  const go = (name) => (location.hash = name);
  const keys = (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tab === "chat" ? "rack" : "chat";
    go(other);
    document.getElementById(`tab-${other}`).focus();
  };
  return html`<div role="tablist" aria-label="Views" onKeyDown=${keys}>
    ${TABS.map(([name, title]) => html`<button type="button" role="tab" id="tab-${name}" aria-controls=${name} aria-selected=${tab === name}
      tabindex=${tab === name ? 0 : -1} onClick=${() => go(name)}>${title}</button>`)}
  </div>`;
}

function App() {
  const [tab, setTab] = useState(here);
  const [signedIn, setSignedIn] = useState(false);
  const [theme, setTheme, look] = useTheme();
  const feed = useFeed(setSignedIn);
  useEffect(() => addEventListener("hashchange", () => setTab(here())), []);
  return html`<header>
      <h1>rackserve</h1>
      <${Tabs} tab=${tab} />
      <label class="theme"><span class="unseen">Colours</span><select value=${theme} onChange=${(event) => setTheme(event.target.value)}>
        ${THEMES.map((name) => html`<option value=${name}>${name}</option>`)}
      </select></label>
      ${signedIn && html`<form method="post" action="/logout"><button>Sign out</button></form>`}
    </header>
    <main>
      <${Chat} hidden=${tab !== "chat"} />
      <${Rack} hidden=${tab !== "rack"} feed=${feed} look=${look} />
    </main>`;
}

render(html`<${App} />`, document.getElementById("app"));
