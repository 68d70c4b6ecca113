"use strict";
// Where the documents come from (a server, or this file itself), which view is shown, light or dark.

const EMBEDDED = document.getElementById("documents");
const COMPARE_EVERY_MS = 5000;
const ALIVE = new Set(["queued", "starting", "running"]); // states that others follow
const main = document.getElementById("main");
const live = document.getElementById("live");

/** The documents in this file: a report. */
class EmbeddedSource {
  constructor(content) {
    this.content = content;
  }

  async runs() {
    return { runs: this.content.runs.map((document) => document.run) };
  }

  async run(name) {
    const found = this.content.runs.find((document) => document.run.name === name);
    if (!found) throw new Error(`This file holds no run named ${name}.`);
    return found;
  }

  async compare(names) {
    return names.slice(1).map((name) => {
      const found = this.content.comparisons.find(({ a, b }) => a.name === names[0] && b.name === name);
      if (!found) throw new Error(`This file does not compare ${names[0]} with ${name}.`);
      return found;
    });
  }

  audio(name) {
    return (id) => this.content.audio[name]?.[id] || null;
  }

  follow() {
    return () => {};
  }
}

/** The server of `muster page`. */
class ServerSource {
  async get(path) {
    const answer = await fetch(path, { cache: "no-store" }).catch(() => {
      throw new Error("The server does not answer. Start it again with: muster page");
    });
    if (answer.status === 403)
      throw new Error(
        "The server does not take this address: it was started again, with another one. It printed it.",
      );
    if (answer.status === 404) throw new Error("There is no such run, or it is no longer there.");
    if (!answer.ok) throw new Error(`The server answered ${answer.status}.`);
    return answer.json();
  }

  runs() {
    return this.get("api/runs");
  }

  run(name) {
    return this.get(`api/runs/${encodeURIComponent(name)}`);
  }

  compare(names) {
    return Promise.all(
      names
        .slice(1)
        .map((name) =>
          this.get(`api/compare?a=${encodeURIComponent(names[0])}&b=${encodeURIComponent(name)}`),
        ),
    );
  }

  audio(name) {
    return (id) => `api/runs/${encodeURIComponent(name)}/audio/${encodeURIComponent(id)}`;
  }

  /** Calls `update` with the parts that changed, until the function that it returns is called. */
  follow(name, version, update, again) {
    const seen = version === undefined ? "" : `&seen=${version}`;
    const stream = new EventSource(name ? `api/stream?run=${encodeURIComponent(name)}${seen}` : "api/stream");
    let lost = false;
    stream.onopen = () => {
      say("live", "live");
      if (lost) again();
      lost = false;
    };
    stream.addEventListener("update", (event) => update(JSON.parse(event.data).sections));
    stream.addEventListener("gone", () => {
      say("gone", "the run's folder is gone: this is what it last held");
      stream.close();
    });
    stream.onerror = () => {
      lost = true;
      const ended = stream.readyState === EventSource.CLOSED;
      say(
        "lost",
        ended
          ? "the server is gone; start it again with: muster page"
          : "the server does not answer; trying again",
      );
    };
    return () => stream.close();
  }
}

const source = EMBEDDED ? new EmbeddedSource(JSON.parse(EMBEDDED.textContent)) : new ServerSource();
let view = null;
let leave = () => {};

function say(state, words) {
  live.className = state;
  if (!words) return live.replaceChildren();
  live.replaceChildren(
    h("span", { class: "glyph", "aria-hidden": "true" }, { live: "●", lost: "◌", gone: "✕" }[state] || ""),
    words,
  );
}

function trail(...parts) {
  const only = EMBEDDED && source.content.runs.length === 1;
  const all = only ? parts : [["Runs", "#/"], ...parts];
  document
    .getElementById("where")
    .replaceChildren(
      ...all.map(([words, address], i) =>
        i === all.length - 1
          ? h("span", { "aria-current": "page" }, words)
          : h("a", { href: address }, words),
      ),
    );
  document.title = `${all.map(([words]) => words).at(-1)} · muster`;
}

const routes = {
  async runs() {
    trail();
    const shownView = new RunsView();
    const content = await source.runs();
    shownView.update(content);
    return [
      shownView,
      () =>
        source.follow(
          null,
          undefined,
          (sections) => shownView.update(Object.assign(content, sections)),
          route,
        ),
    ];
  },

  async run(name) {
    trail([name]);
    const shownView = new RunView({ audio: source.audio(name) });
    const content = await source.run(name);
    const update = (sections) => shownView.update(Object.assign(content, sections), Object.keys(sections));
    const again = async () => shownView.update(Object.assign(content, await source.run(name)));
    return [
      shownView,
      () => source.follow(name, content.version, update, () => again().catch(() => {})),
      () => shownView.update(content),
    ];
  },

  async compare(...names) {
    trail([names.join(" and ")]);
    const shownView = new CompareView();
    shownView.content = await source.compare(names);
    const draw = () => shownView.update(shownView.content);
    const follow = () => {
      const ended = () =>
        shownView.content.every(({ a, b }) => !ALIVE.has(a.state) && !ALIVE.has(b.state));
      const timer = setInterval(async () => {
        if (ended() || EMBEDDED) return;
        try {
          shownView.content = await source.compare(names);
          draw();
          say("live", "live");
        } catch (error) {
          say("lost", error.message);
        }
      }, COMPARE_EVERY_MS);
      return () => clearInterval(timer);
    };
    return [shownView, follow, draw];
  },
};

/** What a report opens with: its run, or its runs compared. */
function firstAddress() {
  if (!EMBEDDED) return "#/";
  const names = source.content.runs.map((document) => document.run.name);
  return names.length === 1 ? addressOf(names[0]) : compareAddress(names);
}

async function route() {
  leave();
  leave = () => {};
  say("", "");
  const address =
    location.hash.length > 2 || (location.hash && !(EMBEDDED && source.content.runs.length === 1))
      ? location.hash
      : firstAddress();
  const [kind, ...names] = address.slice(2).split("/").map(decodeURIComponent);
  const here = (route.latest = Symbol(kind));
  try {
    const open = Object.hasOwn(routes, kind) ? routes[kind] : routes.runs;
    const [shownView, follow, draw] = await open(...names);
    if (route.latest !== here) return;
    view = shownView;
    main.replaceChildren(shownView.element);
    draw?.();
    leave = follow();
    performance.mark("drawn");
  } catch (error) {
    if (route.latest !== here) return;
    view = null;
    main.replaceChildren(
      h("p", { class: "alone", role: "alert" }, error.message),
      h("p", {}, h("a", { href: "#/" }, "All runs")),
    );
  }
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const THEMES = { auto: "Light or dark: as the system", light: "Light", dark: "Dark" };

/** A page from a file may not be allowed to remember anything. */
function remembered(value) {
  try {
    if (value !== undefined) localStorage.setItem("muster-theme", value);
    return localStorage.getItem("muster-theme");
  } catch {
    return null;
  }
}

function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : prefersDark.matches;
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const button = document.getElementById("theme");
  button.textContent = { auto: "◐", light: "○", dark: "●" }[theme];
  button.title = THEMES[theme];
  button.setAttribute("aria-label", `${THEMES[theme]}; press to change`);
  button.dataset.theme = theme;
  view?.redraw?.();
}

document.getElementById("theme").addEventListener("click", (event) => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(event.currentTarget.dataset.theme) + 1) % names.length];
  remembered(next);
  setTheme(next);
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
prefersDark.addEventListener("change", () => view?.redraw?.());
setTheme(THEMES[remembered()] ? remembered() : "auto");
addEventListener("hashchange", route);
route();
