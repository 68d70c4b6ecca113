"use strict";
// What line charts share: one horizontal axis, one cursor and one zoom.

const CHART_HEIGHT = 176;
const MARGIN = { left: 46, right: 10, top: 8, bottom: 24 };
const MARK_GLYPHS = { checkpoint: "◆", restart: "▲", resume: "▸", failure: "✕", stop: "■" };
const SMOOTHING = { off: 0, some: 0.8, much: 0.95 };

const MARK_HEIGHTS = { failure: 2, restart: 12, resume: 22, stop: 2 }; // they often fall on the same step

/** What the charts of a group have in common. A line is {label, css, step, time, mean, low, high, dots, best}. */
class ChartGroup {
  constructor(smooth = "off") {
    Object.assign(this, {
      charts: [],
      axis: "step",
      log: false,
      smooth,
      domain: null,
      cursor: null,
      marks: [],
    });
    this.element = h("div", { class: "charts" });
    this.whole = h(
      "button",
      { type: "button", class: "quiet", hidden: true, onclick: () => this.zoom(null) },
      "Show the whole run",
    );
    this.controls = h(
      "div",
      { class: "controls" },
      choice(
        "Horizontal axis",
        [
          ["step", "Steps"],
          ["time", "Time"],
        ],
        "step",
        (axis) => this.set({ axis, domain: null }),
      ),
      choice(
        "Vertical axis",
        [
          [false, "Linear"],
          [true, "Log"],
        ],
        false,
        (log) => this.set({ log }),
      ),
      h(
        "span",
        { class: "labelled" },
        "Smoothing ",
        choice(
          "Smoothing",
          [
            ["off", "Off"],
            ["some", "Some"],
            ["much", "Much"],
          ],
          smooth,
          (smooth) => this.set({ smooth }),
        ),
      ),
      this.whole,
    );
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  set(changes) {
    Object.assign(this, changes);
    this.whole.hidden = !this.domain;
    this.draw();
  }

  zoom(domain) {
    this.set({ domain });
  }

  point(cursor) {
    this.cursor = cursor;
    for (const chart of this.charts) chart.drawCursor();
  }

  /** `specs` are {id, title, unit, lines, format}; charts that remain keep their elements and the focus. */
  update(specs, marks) {
    this.marks = marks;
    const old = new Map(this.charts.map((chart) => [chart.spec.id, chart]));
    this.charts = specs.map((spec) => {
      const chart = old.get(spec.id) || new Chart(this, spec);
      chart.spec = spec;
      return chart;
    });
    const elements = this.charts.map((chart) => chart.element);
    if (
      elements.some((element, i) => element !== this.element.children[i]) ||
      elements.length !== this.element.children.length
    )
      this.element.replaceChildren(...elements);
    this.draw();
  }

  /** First and last value of the horizontal axis over all charts. */
  full() {
    let [low, high] = [Infinity, -Infinity];
    for (const chart of this.charts)
      for (const line of chart.spec.lines) {
        const xs = line[this.axis];
        if (xs.length) [low, high] = [Math.min(low, xs[0]), Math.max(high, xs[xs.length - 1])];
      }
    if (low > high) return [0, 1];
    return low === high ? [low - 0.5, high + 0.5] : [low, high];
  }

  draw() {
    for (const chart of this.charts) chart.draw();
  }
}
