"use strict";
// Elements, and how numbers are written. Text from a run only ever becomes a text node.

const SVG_NAMESPACE = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined));
  return element;
}

const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG_NAMESPACE, tag), attributes, children);

/** Replaces the contents; the element with the same data-key has the focus again, and scrolled boxes stay. */
function replace(element, ...children) {
  const key = element.contains(document.activeElement) && document.activeElement.dataset.key;
  const scrolled = [...element.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
  element.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined));
  element.querySelectorAll(".scroll").forEach((box, i) => (box.scrollLeft = scrolled[i] || 0));
  if (key) element.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}

const NONE = "–";
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

/** Three or four significant digits; thousands apart by thin spaces, very small ones as powers of ten. */
function number(value, digits = 4) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) {
    const [mantissa, exponent] = value.toExponential(2).split("e");
    return `${Number(mantissa)}e${Number(exponent)}`.replace("-", "−").replace("e-", "e−");
  }
  if (size >= 10 ** (digits - 1)) return whole(value);
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

function whole(value) {
  if (!known(value)) return NONE;
  return String(Math.round(value))
    .replace("-", "−")
    .replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
}

function short(value) {
  for (const [scale, letter] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ])
    if (Math.abs(value) >= scale) return `${Number((value / scale).toPrecision(3))}${letter}`;
  return number(value, 3);
}

function withUnit(value, unit) {
  if (!known(value)) return NONE;
  return unit ? `${number(value)}\u202f${unit}` : number(value);
}

const percent = (value) => (known(value) ? `${Math.round(value * 100)}\u202f%` : NONE);

function duration(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds < 1) return `${number(seconds, 2)}\u202fs`;
  const s = Math.round(seconds);
  if (s < 60) return `${s}\u202fs`;
  if (s < 3600) return `${Math.floor(s / 60)}\u202fmin ${s % 60}\u202fs`;
  if (s < 172800) return `${Math.floor(s / 3600)}\u202fh ${Math.floor((s % 3600) / 60)}\u202fmin`;
  return `${Math.floor(s / 86400)}\u202fd ${Math.floor((s % 86400) / 3600)}\u202fh`;
}

function date(epoch) {
  if (!known(epoch)) return NONE;
  const [then, now] = [new Date(epoch * 1000), new Date()];
  const year = then.getFullYear() === now.getFullYear() ? {} : { year: "numeric" };
  const day = then.toLocaleDateString("en-GB", { day: "numeric", month: "short", ...year });
  return `${day}, ${then.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" })}`;
}

const count = (n, one, many = `${one}s`) => `${whole(n)} ${n === 1 ? one : many}`;

const shown = (value) => {
  if (value === null || value === undefined) return NONE;
  return typeof value === "object" ? JSON.stringify(value) : String(value);
};

// Without a prototype, so that a run cannot name what every object has, such as `constructor`.
// Rates are per second of training, whichever unit is counted.
const NAMES = Object.assign(Object.create(null), {
  loss: "Loss",
  grad_norm: "Gradient norm",
  lr: "Learning rate",
  step_time_s: "Step time",
  data_wait_s: "Waiting for data",
  memory_gib: "Memory",
  samples_per_s: "Throughput",
  tokens_per_s: "Throughput",
  audio_s_per_s: "Throughput",
  mfu: "MFU",
  wer: "Word error rate",
  cer: "Character error rate",
  perplexity: "Perplexity",
  accuracy: "Accuracy",
});
const UNITS = Object.assign(Object.create(null), {
  audio_s_per_s: "× real time",
  tokens_per_s: "tokens/s",
  samples_per_s: "samples/s",
  step_time_s: "s",
  data_wait_s: "s",
  memory_gib: "GiB",
});
const named = (name) => NAMES[name] || name.replace(/_/g, " ").replace(/^./, (c) => c.toUpperCase());
const RATES = new Set(["wer", "cer", "accuracy", "mfu", "ser"]);
const isCount = (name) => /^(words|word_|char|clips|exact_clips|units)/.test(name); // what rates are made of
const scored = (name, value) =>
  RATES.has(name) && known(value) ? `${number(value * 100, 3)}\u202f%` : number(value);

const STATES = Object.assign(Object.create(null), {
  running: ["●", "running"],
  starting: ["◌", "starting"],
  queued: ["◌", "queued"],
  finished: ["✓", "finished"],
  failed: ["✕", "failed"],
  stopped: ["■", "stopped"],
  interrupted: ["?", "interrupted"],
  lost: ["?", "lost"],
});

function stateMark(state) {
  const [glyph, word] = STATES[state] || ["?", state];
  return h(
    "span",
    { class: `state ${state}` },
    h("span", { class: "glyph", "aria-hidden": "true" }, glyph),
    word,
  );
}

/** A key, which a narrow page breaks after a dot or an underscore. */
const keyed = (name) =>
  h(
    "code",
    { class: "key-name" },
    name.split(/(?<=[._])/).flatMap((part, i) => (i ? [h("wbr"), part] : [part])),
  );

/** A section with its heading in the margin; empty ones hide. */
function section(id, title, ...children) {
  const body = h("div", { class: "body" }, ...children);
  const element = h(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    h("h2", { id: `${id}-title` }, title),
    body,
  );
  return { element, body };
}

/** Rows of cells; a number is set to the right. `columns` are titles, with `>` before those of numbers. */
function table(caption, columns, rows, attributes = {}) {
  const right = columns.map((title) => title.startsWith(">"));
  const cell = (content, i) =>
    h("td", { class: right[i] ? "n" : null, "data-title": columns[i].replace(">", "") }, content);
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h(
      "table",
      attributes,
      h("caption", { class: "hidden" }, caption),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          columns.map((title, i) =>
            h("th", { scope: "col", class: right[i] ? "n" : null }, title.replace(">", "")),
          ),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) => (row instanceof Element ? row : h("tr", {}, row.map(cell)))),
      ),
    ),
  );
}

/** The arrow keys move between the elements of `selector` in a table or list. */
function arrowKeys(element, selector) {
  element.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const stops = [...element.querySelectorAll(selector)];
    const here = stops.indexOf(document.activeElement.closest(selector));
    if (!move || here < 0) return;
    event.preventDefault();
    stops[Math.min(stops.length - 1, Math.max(0, here + move))].focus();
  });
}

/** A group of buttons of which one is pressed. */
function choice(label, options, value, onchange) {
  const group = h("span", { class: "choice", role: "group", "aria-label": label });
  for (const [key, text] of options)
    group.append(
      h(
        "button",
        {
          type: "button",
          "aria-pressed": String(key === value),
          onclick: (event) => {
            for (const button of group.children)
              button.setAttribute("aria-pressed", String(button === event.currentTarget));
            onchange(key);
          },
        },
        text,
      ),
    );
  return group;
}
