"use strict";
// The heat map of all ranks over the steps.

const RAMPS = {
  light: {
    compute: [
      [240, 244, 247],
      [86, 160, 211],
      [0, 58, 105],
    ],
    wait: [
      [249, 244, 236],
      [230, 150, 40],
      [122, 52, 0],
    ],
    data: [
      [247, 242, 246],
      [204, 121, 167],
      [95, 20, 72],
    ],
  },
  dark: {
    compute: [
      [29, 34, 39],
      [0, 105, 170],
      [150, 215, 255],
    ],
    wait: [
      [36, 32, 28],
      [180, 95, 0],
      [255, 215, 140],
    ],
    data: [
      [35, 30, 34],
      [160, 70, 125],
      [255, 195, 230],
    ],
  },
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
    this.element = h(
      "figure",
      { class: "heat" },
      h(
        "figcaption",
        {},
        choice(
          "Shown",
          PARTS.map(([part, words]) => [part, words[0].toUpperCase() + words.slice(1)]),
          "compute",
          (part) => {
            this.part = part;
            this.draw();
          },
        ),
        this.scale,
      ),
      h(
        "div",
        { class: "plot" },
        this.labels,
        h("div", { class: "cells" }, this.canvas, this.box),
        h("span"),
        this.below,
      ),
      this.readout,
    );
    this.canvas.addEventListener("pointermove", (event) => {
      const { left, top, width, height } = this.canvas.getBoundingClientRect();
      this.point(
        Math.floor(((event.clientY - top) / height) * this.rows),
        Math.floor(((event.clientX - left) / width) * this.bins),
      );
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
    this.cell =
      row === null
        ? null
        : [Math.min(this.rows - 1, Math.max(0, row)), Math.min(this.bins - 1, Math.max(0, bin))];
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
    this.canvas.setAttribute(
      "aria-label",
      `Heat map of ${rows} ranks over the steps. Arrow keys read its cells; the table of ranks has the numbers.`,
    );
    this.drawLabels(height);
    const [first, last] = [this.heat.step[0], this.heat.step[bins]];
    this.below.replaceChildren(
      ...niceTicks(first, last - (last - first) * 0.06, 5)
        .filter(Number.isInteger)
        .map((tick) => {
          const label = h("span", {}, short(tick));
          label.style.left = `${((tick - first) / (last - first)) * 100}%`;
          return label;
        }),
      h("i", {}, "step"),
    );
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
    this.labels.replaceChildren(
      ...this.heat.ranks
        .map((rank, i) => {
          const near = flagged.some((glyph, j) => glyph && j !== i && Math.abs(j - i) < every);
          const wanted = (flagged[i] || (i % every === 0 && !near)) && i - last >= every;
          if (!wanted) return null;
          last = i;
          const label = h(
            "span",
            { class: flagged[i] ? `mark ${this.states.get(rank)}` : null },
            flagged[i] ? `${flagged[i]} ${rank}` : `${rank}`,
          );
          label.style.top = `${(i + 0.5) * height}px`;
          return label;
        })
        .filter(Boolean),
    );
  }

  drawCell() {
    this.box.hidden = !this.cell;
    if (!this.cell) {
      this.readout.textContent = "Point at a cell, or move with the arrow keys, to read it.";
      return;
    }
    const [row, bin] = this.cell;
    Object.assign(this.box.style, {
      left: `${(bin / this.bins) * 100}%`,
      width: `${100 / this.bins}%`,
      top: `${(row / this.rows) * 100}%`,
      height: `${100 / this.rows}%`,
    });
    const { step, ranks } = this.heat;
    const others = median(this.heat[this.part].map((values) => values[bin]));
    const here = this.heat[this.part][row][bin];
    const times = known(here) && others ? ` (${number(here / others, 2)} × the median)` : "";
    const first = step[bin] + 1;
    const steps =
      first >= step[bin + 1]
        ? `step ${whole(step[bin + 1])}`
        : `steps ${whole(first)} to ${whole(step[bin + 1])}`;
    this.readout.setAttribute("aria-live", document.activeElement === this.canvas ? "polite" : "off");
    this.readout.replaceChildren(
      h("b", {}, `Rank ${ranks[row]}, ${steps}: `),
      PARTS.map(
        ([part, words]) =>
          `${words} ${withUnit(this.heat[part][row]?.[bin], "s")}${part === this.part ? times : ""}`,
      ).join(" · "),
    );
  }
}
