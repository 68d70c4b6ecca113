"use strict";
// One line chart: axes, lines, marks, and what the pointer and the keyboard do in it.

class Chart {
  constructor(group, spec) {
    Object.assign(this, { group, spec, dragged: null });
    this.readout = h("output", { class: "readout" });
    this.heading = h("h3", {});
    this.svg = svg("svg", {
      tabindex: "0",
      role: "img",
      height: CHART_HEIGHT,
      "data-key": `chart-${spec.id}`,
    });
    this.element = h(
      "figure",
      { class: "chart", "data-chart": spec.id },
      h("figcaption", {}, this.heading, this.readout),
      this.svg,
    );
    this.cursor = svg("g", { class: "cursor" });
    this.listen();
  }

  listen() {
    const at = (event) => this.x.invert(event.clientX - this.svg.getBoundingClientRect().left);
    this.svg.addEventListener("pointermove", (event) => {
      this.group.point(at(event));
      if (this.dragged !== null) this.drawSelection(at(event));
    });
    this.svg.addEventListener(
      "pointerleave",
      () => this.dragged === null && document.activeElement !== this.svg && this.group.point(null),
    );
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.pointerType === "touch") return;
      this.dragged = at(event);
      this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener("pointerup", (event) => {
      const [from, to] = [this.dragged, at(event)];
      this.dragged = null;
      this.selection?.remove();
      if (from !== null && Math.abs(this.x(from) - this.x(to)) > 5)
        this.group.zoom([Math.min(from, to), Math.max(from, to)]);
    });
    this.svg.addEventListener("dblclick", () => this.group.zoom(null));
    this.svg.addEventListener("blur", () => this.group.point(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  /** Arrows move the cursor from point to point, + and - zoom around it, Escape shows everything. */
  key(event) {
    const xs = this.visible(this.spec.lines[0]?.[this.group.axis] || []);
    if (!xs.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const here = this.group.cursor === null ? xs.length - 1 : nearest(xs, this.group.cursor);
    const stride = event.shiftKey ? 10 : 1;
    const goal = { ArrowLeft: here - stride, ArrowRight: here + stride, Home: 0, End: xs.length - 1 }[
      event.key
    ];
    if (goal !== undefined) this.group.point(xs[Math.min(xs.length - 1, Math.max(0, goal))]);
    else if (event.key === "+" || event.key === "-") {
      const [low, high] = this.domain;
      const half = ((high - low) / 2) * (event.key === "+" ? 0.5 : 2);
      const [first, last] = this.group.full();
      const domain = [Math.max(first, xs[here] - half), Math.min(last, xs[here] + half)];
      this.group.zoom(domain[0] <= first && domain[1] >= last ? null : domain);
    } else if (event.key === "Escape") this.group.zoom(null);
    else return;
    event.preventDefault();
  }

  visible(xs) {
    return xs.filter((x) => x >= this.domain[0] && x <= this.domain[1]);
  }

  draw() {
    const { group, spec } = this;
    const width = this.element.clientWidth;
    if (!width) return;
    this.svg.setAttribute("width", width);
    this.domain = group.domain || group.full();
    this.x = scale(this.domain, [MARGIN.left, width - MARGIN.right]);
    const inside = (value, x) => x >= this.domain[0] && x <= this.domain[1];
    const arrays = spec.lines.flatMap((line) =>
      (spec.lines.length > 1 ? [line.mean] : [line.mean, line.low, line.high])
        .filter(Boolean)
        .map((values) => [line[group.axis], values]),
    );
    const limits =
      spec.lines.length > 1
        ? [-Infinity, Infinity]
        : spikeLimits(spec.lines.flatMap((line) => (line.low?.length ? [line.low, line.high] : [])));
    const usual = (value, x) => inside(value, x) && value >= limits[0] && value <= limits[1];
    const positive = extent(arrays, (value, x) => value > 0 && usual(value, x));
    const log = group.log && positive !== null;
    let [low, high] = (log ? positive : extent(arrays, usual)) || [0, 1];
    if (low === high)
      [low, high] = log
        ? [low / 2, high * 2]
        : [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1];
    else if (!log) [low, high] = [low >= 0 && low < (high - low) * 0.5 ? 0 : low, high + (high - low) * 0.04];
    this.y = scale([low, high], [CHART_HEIGHT - MARGIN.bottom, MARGIN.top], log);
    this.heading.replaceChildren(
      spec.title,
      ...(spec.unit ? [h("span", { class: "unit" }, ` ${spec.unit}`)] : []),
    );
    this.svg.setAttribute("aria-label", this.words());
    const clip = `clip-${spec.id}`;
    this.svg.replaceChildren(
      svg(
        "clipPath",
        { id: clip },
        svg("rect", {
          x: MARGIN.left - 1,
          y: 0,
          width: Math.max(0, width - MARGIN.left),
          height: CHART_HEIGHT,
        }),
      ),
      this.axes(width, log ? logTicks(low, high) : niceTicks(low, high, 4)),
      svg(
        "g",
        { "clip-path": `url(#${clip})` },
        spec.lines.map((line) => this.line(line)),
      ),
      this.beyond(high),
      this.marks(),
      this.cursor,
    );
    this.drawCursor();
  }

  axes(width, ticks) {
    const bottom = CHART_HEIGHT - MARGIN.bottom;
    const about = Math.max(3, Math.floor(width / 90));
    const time = this.group.axis === "time";
    const across = (time ? timeTicks : niceTicks)(this.domain[0], this.domain[1], about).filter(
      (t) => time || Number.isInteger(t),
    );
    return svg(
      "g",
      { class: "axes" },
      ticks.map((tick) => [
        svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: this.y(tick), y2: this.y(tick) }),
        svg(
          "text",
          { x: MARGIN.left - 7, y: this.y(tick) + 3.5, "text-anchor": "end" },
          this.spec.tick ? this.spec.tick(tick) : short(tick),
        ),
      ]),
      svg("line", { class: "base", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }),
      across.map((tick) =>
        svg(
          "text",
          { x: this.x(tick), y: bottom + 16, "text-anchor": this.x(tick) > width - 30 ? "end" : "middle" },
          time ? clockTick(tick) : short(tick),
        ),
      ),
    );
  }

  path(xs, values) {
    let text = "";
    let pen = false;
    for (let i = 0; i < xs.length; i++) {
      const ok = known(values[i]) && Number.isFinite(this.y(values[i]));
      if (ok) text += `${pen ? "L" : "M"}${this.x(xs[i]).toFixed(1)} ${this.y(values[i]).toFixed(1)}`;
      pen = ok;
    }
    return text;
  }

  band(xs, low, high) {
    const points = [];
    const bottom = this.y.invert(CHART_HEIGHT - MARGIN.bottom);
    for (let i = 0; i < xs.length; i++)
      if (known(low[i]) && known(high[i]) && Number.isFinite(this.y(high[i])))
        points.push([this.x(xs[i]), this.y(Math.max(low[i], bottom)), this.y(high[i])]);
    const top = points.map(([x, , y]) => `${x.toFixed(1)} ${y.toFixed(1)}`);
    const back = points.reverse().map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`);
    return top.length > 1 ? `M${[...top, ...back].join("L")}Z` : "";
  }

  line(line) {
    const xs = line[this.group.axis];
    const weight = line.dots || this.spec.id === "lr" ? 0 : SMOOTHING[this.group.smooth];
    const parts = [];
    if (line.low?.length && this.spec.lines.length === 1)
      parts.push(svg("path", { class: "band", d: this.band(xs, line.low, line.high) }));
    if (weight) parts.push(svg("path", { class: "raw", d: this.path(xs, line.mean) }));
    parts.push(
      svg("path", { class: "curve", d: this.path(xs, weight ? smoothed(line.mean, weight) : line.mean) }),
    );
    if (line.dots || xs.length === 1)
      xs.forEach((x, i) => {
        if (!known(line.mean[i])) return;
        if (line.best === i)
          parts.push(svg("circle", { class: "best", cx: this.x(x), cy: this.y(line.mean[i]), r: 6 }));
        parts.push(svg("circle", { class: "dot", cx: this.x(x), cy: this.y(line.mean[i]), r: 2.5 }));
      });
    return svg("g", { class: `line ${line.css}` }, parts);
  }

  /** Small marks at the top edge where single steps lie above the axis. */
  beyond(high) {
    return svg(
      "g",
      { class: "beyond" },
      highsOf(this.spec, this.group.axis)
        .filter(([x, value]) => value > high && x >= this.domain[0] && x <= this.domain[1])
        .map(([x, value]) =>
          svg(
            "path",
            { d: `M${this.x(x).toFixed(1)} 1l2.5 4h-5z` },
            svg("title", {}, `up to ${number(value)}`),
          ),
        ),
    );
  }

  marks() {
    const bottom = CHART_HEIGHT - MARGIN.bottom;
    let last = -Infinity;
    const drawn = [];
    for (const mark of this.group.marks) {
      const x = mark[this.group.axis];
      if (!known(x) || x < this.domain[0] || x > this.domain[1]) continue;
      const place = this.x(x);
      const quiet = mark.kind === "checkpoint";
      if (quiet && place - last < 7) continue;
      if (quiet) last = place;
      else drawn.push(svg("line", { x1: place, x2: place, y1: MARGIN.top, y2: bottom }));
      drawn.push(
        svg(
          "text",
          {
            class: mark.kind,
            x: place,
            y: quiet ? bottom + 3 : MARGIN.top + (MARK_HEIGHTS[mark.kind] || 2),
            "text-anchor": "middle",
          },
          MARK_GLYPHS[mark.kind] || "◆",
          svg("title", {}, mark.text),
        ),
      );
    }
    return svg("g", { class: "marks" }, drawn);
  }

  drawCursor() {
    const { group, spec } = this;
    const said = [];
    const shapes = [];
    for (const line of spec.lines) {
      const xs = line[group.axis];
      const i = xs.length ? (group.cursor === null ? lastKnown(line.mean) : nearest(xs, group.cursor)) : -1;
      if (i < 0) continue;
      const value = (spec.format || ((v) => withUnit(v, spec.unit)))(line.mean[i]);
      said.push(
        h("span", { class: line.css }, spec.lines.length > 1 ? `${line.label} ` : null, h("b", {}, value)),
      );
      if (group.cursor === null || !this.x) continue;
      if (line === spec.lines[0]) {
        shapes.push(
          svg("line", {
            x1: this.x(xs[i]),
            x2: this.x(xs[i]),
            y1: MARGIN.top,
            y2: CHART_HEIGHT - MARGIN.bottom,
          }),
        );
        said.unshift(
          h(
            "span",
            { class: "at" },
            group.axis === "step" ? `step ${whole(xs[i])}` : clockTick(Math.round(xs[i])),
          ),
        );
      }
      if (known(line.mean[i]))
        shapes.push(svg("circle", { class: line.css, cx: this.x(xs[i]), cy: this.y(line.mean[i]), r: 3.5 }));
    }
    this.readout.replaceChildren(...said);
    this.readout.setAttribute("aria-live", document.activeElement === this.svg ? "polite" : "off");
    this.cursor.replaceChildren(...shapes);
  }

  drawSelection(to) {
    this.selection?.remove();
    const [a, b] = [this.x(this.dragged), this.x(to)].sort((p, q) => p - q);
    this.selection = svg("rect", {
      class: "selection",
      x: a,
      width: b - a,
      y: MARGIN.top,
      height: CHART_HEIGHT - MARGIN.top - MARGIN.bottom,
    });
    this.svg.append(this.selection);
  }

  /** The chart in one sentence, for those who do not see it. */
  words() {
    const parts = this.spec.lines.map((line) => {
      const values = line.mean.filter(known);
      if (!values.length) return `${line.label}: no values`;
      const format = this.spec.format || ((v) => withUnit(v, this.spec.unit));
      return (
        `${line.label}: ${format(values[0])} first, ${format(values[values.length - 1])} last, ` +
        `lowest ${format(values.reduce((a, b) => Math.min(a, b)))}, highest ${format(values.reduce((a, b) => Math.max(a, b)))}`
      );
    });
    return `${this.spec.title}. ${parts.join(". ")}. Arrow keys read values; plus and minus zoom; Escape shows everything.`;
  }
}

const highsOf = (spec, axis) =>
  (spec.lines.length > 1 ? [] : spec.lines).flatMap((line) =>
    (line.high || []).map((value, i) => [line[axis][i], value]),
  );

/** Few extreme steps do not flatten a curve: the axis leaves out the last half percent on either side where
 * it lies far from the rest. */
function spikeLimits(arrays) {
  const all = arrays
    .flat()
    .filter(known)
    .sort((a, b) => a - b);
  if (all.length < 100) return [-Infinity, Infinity];
  const at = (share) => all[Math.round((all.length - 1) * share)];
  const span = at(0.995) - at(0.005) || Math.abs(at(0.5)) || 1;
  return [at(0.005) - span * 0.5, at(0.995) + span * 0.5];
}

function lastKnown(values) {
  for (let i = values.length - 1; i >= 0; i--) if (known(values[i])) return i;
  return -1;
}
