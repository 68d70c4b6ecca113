"use strict";
// Ranks: a strip that is seen at a glance, the heat map rank × step, and the table.

const PARTS = [
  ["compute", "computing"],
  ["wait", "waiting for others"],
  ["data", "waiting for data"],
];
const RANK_STATES = {
  ok: ["", ""], slow: ["▲", "slow"], idle: ["○", "idle"], silent: ["…", "silent"], failed: ["✕", "failed"], ended: ["", "ended"],
};

function rankMark(state) {
  const [glyph, word] = RANK_STATES[state] || ["?", state];
  return word ? h("span", { class: `mark ${state}` }, h("span", { class: "glyph", "aria-hidden": "true" }, glyph), word) : "";
}

const median = (values) => {
  const sorted = values.filter(known).sort((a, b) => a - b);
  return sorted.length ? (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2 : null;
};

/** The patterns that tell the parts of a bar apart without colours. */
function patterns() {
  const pattern = (id, ...shapes) =>
    svg("pattern", { id, width: 5, height: 5, patternUnits: "userSpaceOnUse" }, svg("rect", { width: 5, height: 5, class: "ground" }), ...shapes);
  return svg("svg", { width: 0, height: 0, class: "defs", "aria-hidden": "true" }, svg("defs", {},
    pattern("fill-wait", svg("path", { d: "M-1 6L6 -1M-1 1L1 -1M4 6L6 4" })),
    pattern("fill-data", svg("circle", { cx: 2.5, cy: 2.5, r: 1.1 }))));
}

const seconds = (row) => PARTS.map(([part]) => row[`${part}_s`] || 0);

function partsKey() {
  return h("p", { class: "legend" }, PARTS.map(([part, words]) =>
    h("span", { class: "key" }, svg("svg", { width: 14, height: 10, "aria-hidden": "true" }, svg("rect", { class: part, width: 14, height: 10 })), words)));
}

function bar(row, longest) {
  let x = 0;
  const rects = seconds(row).map((value, i) => {
    const width = longest ? (value / longest) * 100 : 0;
    const rect = svg("rect", { class: PARTS[i][0], x: `${x}%`, width: `${width}%`, height: 10 });
    x += width;
    return rect;
  });
  const words = PARTS.map(([part, name]) => `${name} ${withUnit(row[`${part}_s`], "s")}`).join(", ");
  return svg("svg", { class: "bar", height: 10, role: "img", "aria-label": words }, svg("title", {}, words), rects);
}

/** One column per rank: what it does of each step. A run in which only one GPU works is seen here. */
function strip(rows) {
  const known_ = rows.filter((row) => known(row.compute_s));
  if (!known_.length || rows.length < 2) return null;
  const [width, height] = [Math.max(4, Math.min(30, Math.floor(640 / rows.length))), 54];
  const longest = Math.max(...rows.map((row) => seconds(row).reduce((a, b) => a + b)));
  const columns = rows.map((row, i) => {
    let y = height;
    const rects = seconds(row).map((value, part) => {
      const tall = longest ? (value / longest) * height : 0;
      y -= tall;
      return svg("rect", { class: PARTS[part][0], x: i * width, y, width: width - (width > 6 ? 2 : 1), height: tall });
    });
    const [glyph] = RANK_STATES[row.state] || ["?"];
    return svg("g", {}, svg("title", {}, `rank ${row.rank}: ${PARTS.map(([p, w]) => `${w} ${withUnit(row[`${p}_s`], "s")}`).join(", ")}`), rects,
      glyph ? svg("text", { class: row.state, x: i * width + width / 2 - 0.5, y: -4, "text-anchor": "middle" }, glyph) : null,
      glyph || rows.length <= 16 ? svg("text", { class: "rank", x: i * width + width / 2 - 0.5, y: height + 12, "text-anchor": "middle" }, row.rank) : null);
  });
  const box = `0 -14 ${rows.length * width} ${height + 28}`;
  return h("figure", { class: "strip" },
    svg("svg", { viewBox: box, width: rows.length * width, height: height + 28, role: "img", "aria-label": "What each rank does of a step; the table of ranks has the numbers" }, columns),
    h("figcaption", {}, "A step of each rank, from its last steps", partsKey()));
}

const RAMPS = {
  light: { compute: [[240, 244, 247], [86, 160, 211], [0, 58, 105]], wait: [[249, 244, 236], [230, 150, 40], [122, 52, 0]], data: [[247, 242, 246], [204, 121, 167], [95, 20, 72]] },
  dark: { compute: [[29, 34, 39], [0, 105, 170], [150, 215, 255]], wait: [[36, 32, 28], [180, 95, 0], [255, 215, 140]], data: [[35, 30, 34], [160, 70, 125], [255, 195, 230]] },
};

function ramp([a, b, c], share) {
  const [from, to, t] = share < 0.5 ? [a, b, share * 2] : [b, c, share * 2 - 1];
  return from.map((value, i) => value + (to[i] - value) * t);
}

/** Rank × step, one part of the step at a time. Each bin is one pixel of a canvas that CSS enlarges. */
class HeatMap {
  constructor() {
    Object.assign(this, { part: "compute", cell: null, marked: null });
    this.canvas = h("canvas", { tabindex: "0", role: "img", "data-key": "heat" });
    this.labels = h("div", { class: "labels", "aria-hidden": "true" });
    this.box = h("div", { class: "cell", hidden: true });
    this.below = h("div", { class: "steps", "aria-hidden": "true" });
    this.readout = h("output", { class: "readout" });
    this.scale = h("span", { class: "ramp" });
    this.element = h("figure", { class: "heat" },
      h("figcaption", {}, choice("Shown", PARTS.map(([part, words]) => [part, words[0].toUpperCase() + words.slice(1)]), "compute", (part) => {
        this.part = part;
        this.draw();
      }), this.scale),
      h("div", { class: "plot" }, this.labels, h("div", { class: "cells" }, this.canvas, this.box), h("span"), this.below), this.readout);
    this.canvas.addEventListener("pointermove", (event) => {
      const { left, top, width, height } = this.canvas.getBoundingClientRect();
      this.point(Math.floor(((event.clientY - top) / height) * this.rows), Math.floor(((event.clientX - left) / width) * this.bins));
    });
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("blur", () => this.point(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  get rows() {
    return this.heat?.ranks.length || 0;
  }

  get bins() {
    return Math.max(0, (this.heat?.step.length || 0) - 1);
  }

  key(event) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move || !this.rows || !this.bins) return;
    event.preventDefault();
    const [row, bin] = this.cell || [0, this.bins];
    this.point(row + move[0], bin + move[1]);
  }

  point(row, bin) {
    this.cell = row === null ? null : [Math.min(this.rows - 1, Math.max(0, row)), Math.min(this.bins - 1, Math.max(0, bin))];
    this.drawCell();
  }

  update(heat, rows) {
    this.heat = heat;
    this.states = new Map(rows.map((row) => [row.rank, row.state]));
    this.draw();
  }

  draw() {
    const [rows, bins] = [this.rows, this.bins];
    this.element.hidden = !rows || !bins;
    if (!rows || !bins) return;
    const values = this.heat[this.part];
    this.top = this.highest(values);
    const colours = RAMPS[isDark() ? "dark" : "light"][this.part];
    [this.canvas.width, this.canvas.height] = [bins, rows];
    const context = this.canvas.getContext("2d");
    const image = context.createImageData(bins, rows);
    for (let row = 0; row < rows; row++)
      for (let bin = 0; bin < bins; bin++) {
        const value = values[row][bin];
        if (!known(value)) continue;
        const at = (row * bins + bin) * 4;
        image.data.set([...ramp(colours, Math.min(1, value / this.top)), 255], at);
      }
    context.putImageData(image, 0, 0);
    const height = Math.max(6, Math.min(22, Math.round(340 / rows)));
    this.canvas.style.height = `${height * rows}px`;
    this.canvas.setAttribute("aria-label", `Heat map of ${rows} ranks over the steps. Arrow keys read its cells; the table of ranks has the numbers.`);
    this.drawLabels(height);
    const [first, last] = [this.heat.step[0], this.heat.step[bins]];
    this.below.replaceChildren(...niceTicks(first, last - (last - first) * 0.06, 5).filter(Number.isInteger).map((tick) => {
      const label = h("span", {}, short(tick));
      label.style.left = `${((tick - first) / (last - first)) * 100}%`;
      return label;
    }), h("i", {}, "step"));
    const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => `rgb(${ramp(colours, share).map(Math.round)})`);
    const band = h("span", { class: "band" });
    band.style.background = `linear-gradient(to right, ${stops})`;
    this.scale.replaceChildren("0", band, `${withUnit(this.top, "s")} per step`);
    this.drawCell();
  }

  /** Of the rank with the highest values, all but a few bins: those in which it started or saved. */
  highest(values) {
    const tops = values.map((row) => {
      const sorted = row.filter(known).sort((a, b) => a - b);
      return sorted[Math.floor((sorted.length - 1) * 0.98)] || 0;
    });
    return Math.max(...tops) || 1;
  }

  drawLabels(height) {
    const every = height >= 12 ? 1 : Math.ceil(12 / height);
    let last = -Infinity;
    const flagged = this.heat.ranks.map((rank) => RANK_STATES[this.states.get(rank)]?.[0]);
    this.labels.replaceChildren(...this.heat.ranks.map((rank, i) => {
      const near = flagged.some((glyph, j) => glyph && j !== i && Math.abs(j - i) < every);
      const wanted = (flagged[i] || (i % every === 0 && !near)) && i - last >= every;
      if (!wanted) return null;
      last = i;
      const label = h("span", { class: flagged[i] ? `mark ${this.states.get(rank)}` : null }, flagged[i] ? `${flagged[i]} ${rank}` : `${rank}`);
      label.style.top = `${(i + 0.5) * height}px`;
      return label;
    }).filter(Boolean));
  }

  drawCell() {
    this.box.hidden = !this.cell;
    if (!this.cell) {
      this.readout.textContent = "Point at a cell, or move with the arrow keys, to read it.";
      return;
    }
    const [row, bin] = this.cell;
    Object.assign(this.box.style, { left: `${(bin / this.bins) * 100}%`, width: `${100 / this.bins}%`, top: `${(row / this.rows) * 100}%`, height: `${100 / this.rows}%` });
    const { step, ranks } = this.heat;
    const others = median(this.heat[this.part].map((values) => values[bin]));
    const here = this.heat[this.part][row][bin];
    const times = known(here) && others ? ` (${number(here / others, 2)} × the median)` : "";
    const first = step[bin] + 1;
    const steps = first >= step[bin + 1] ? `step ${whole(step[bin + 1])}` : `steps ${whole(first)} to ${whole(step[bin + 1])}`;
    this.readout.setAttribute("aria-live", document.activeElement === this.canvas ? "polite" : "off");
    this.readout.replaceChildren(h("b", {}, `Rank ${ranks[row]}, ${steps}: `),
      PARTS.map(([part, words]) => `${words} ${withUnit(this.heat[part][row]?.[bin], "s")}${part === this.part ? times : ""}`).join(" · "));
  }
}

const shortDevice = (device) => (device || "").replace(/^(NVIDIA|AMD) /, "");

function gauge(share, words) {
  if (!known(share)) return NONE;
  return h("span", { class: "gauge" }, words, svg("svg", { height: 4, "aria-hidden": "true" },
    svg("rect", { class: "track", width: "100%", height: 4 }), svg("rect", { class: "level", width: `${Math.min(100, Math.max(0, share * 100))}%`, height: 4 })));
}

const SHOWN_RANKS = 16;

/** One line per rank. Of many, those with a mark and the first ones, and a button for the others. */
class RankTable {
  constructor() {
    this.all = false;
    this.element = h("div", {});
    arrowKeys(this.element, "tbody tr");
  }

  update(rows, live) {
    const marked = (row) => row.state !== "ok" && row.state !== "ended";
    const first = [...rows.filter(marked), ...rows.filter((row) => !marked(row))].slice(0, SHOWN_RANKS);
    const more = rows.length > SHOWN_RANKS;
    const press = () => {
      this.all = !this.all;
      this.update(rows, live);
    };
    replace(this.element, rows.length ? [partsKey(), rankTable(this.all || !more ? rows : first, live)] : h("p", { class: "faint" }, "No rank has said anything yet."),
      more ? h("p", { class: "note" }, h("button", { type: "button", class: "quiet", onclick: press, "data-key": "more" }, this.all ? "Show fewer ranks" : `Show all ${rows.length} ranks`)) : null);
  }
}

/** Columns nothing is known of are left out, and the step where all ranks are at the same. */
function rankTable(rows, live) {
  const longest = Math.max(...rows.map((row) => seconds(row).reduce((a, b) => a + b)));
  const memory = (row) => (known(row.memory_total_gib) ? gauge(row.memory_gib / row.memory_total_gib, `${number(row.memory_gib, 3)} of ${number(row.memory_total_gib, 3)}`) : number(row.memory_gib, 3));
  const all = [
    [">Rank", (row) => row.rank, () => true],
    ["", (row) => (row.state === "ended" && !live ? "" : rankMark(row.state)), (row) => row.state !== "ok" && row.state !== "ended"],
    ["Node", (row) => row.node, (row) => row.node],
    ["Device", (row) => shortDevice(row.device), (row) => row.device],
    [">Step", (row) => whole(row.step), (row) => row.step !== rows[0].step],
    ["Doing", (row) => row.phase, (row) => live && row.phase],
    [">Computing", (row) => withUnit(row.compute_s, "s"), (row) => known(row.compute_s)],
    ["Of a step", (row) => bar(row, longest), (row) => known(row.compute_s)],
    [">Busy", (row) => gauge(row.utilisation, percent(row.utilisation)), (row) => known(row.utilisation)],
    [">Memory, GiB", memory, (row) => known(row.memory_gib)],
    [">Power", (row) => withUnit(known(row.power_w) ? Math.round(row.power_w) : null, "W"), (row) => known(row.power_w)],
    [">Temp.", (row) => withUnit(known(row.temperature_c) ? Math.round(row.temperature_c) : null, "°C"), (row) => known(row.temperature_c)],
    [">Silent", (row) => duration(row.silent_s), (row) => live && row.silent_s > 5],
  ];
  const columns = all.filter(([, , present]) => rows.some(present));
  const lines = rows.map((row, i) => h("tr", { class: row.state, tabindex: i ? "-1" : "0", "data-key": `rank-${row.rank}` },
    columns.map(([title, cell]) => h("td", { class: title.startsWith(">") ? "n" : null, "data-title": title.replace(">", "") }, cell(row)))));
  return table("Ranks", columns.map(([title]) => title), lines, { class: "ranks" });
}
