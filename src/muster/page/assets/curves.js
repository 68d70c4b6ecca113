"use strict";
// From a run's curves and evaluations to charts, and to a table in their place.

const ORDER = [
  "loss",
  "grad_norm",
  "lr",
  "audio_s_per_s",
  "tokens_per_s",
  "samples_per_s",
  "mfu",
  "step_time_s",
  "data_wait_s",
  "memory_gib",
];
const TABLE_ROWS = 25;

/** Seconds since the run's first step, whichever clock the times are from. */
function sinceStart(times, origin) {
  return times.map((t) => (known(t) ? t - origin : null));
}

function orderOf(name) {
  const place = ORDER.indexOf(name);
  return place < 0 ? ORDER.length : place;
}

/** Of samples, tokens and seconds of audio per second one says how fast a run is: the task's own. */
function drawnSeries(all) {
  const names = Object.keys(all).filter((name) => (all[name].mean || []).some(known));
  const rate = ["audio_s_per_s", "tokens_per_s"].find((name) => names.includes(name));
  return names.filter((name) => !(rate && name === "samples_per_s")).sort((a, b) => orderOf(a) - orderOf(b));
}

/** Charts of one or several runs: [{label, css, curves, evaluations}]. */
function chartsOf(runs) {
  const specs = new Map();
  const chart = (id, title, unit, format, tick) => {
    if (!specs.has(id)) specs.set(id, { id, title, unit, format, tick, lines: [] });
    return specs.get(id).lines;
  };
  const names = new Set(runs.flatMap((run) => drawnSeries(run.curves.series || {})));
  for (const name of [...names].sort((a, b) => orderOf(a) - orderOf(b)))
    for (const run of runs) {
      const series = run.curves.series[name];
      if (!series) continue;
      const origin = originOf(run);
      chart(name, named(name), series.unit || "", null).push({
        label: run.label,
        css: run.css,
        step: run.curves.step,
        time: sinceStart(run.curves.time, origin),
        mean: series.mean,
        low: series.low,
        high: series.high,
      });
    }
  for (const run of runs) evaluationLines(run, chart);
  return [...specs.values()];
}

const originOf = (run) => run.curves.time?.find(known) ?? 0;

function evaluationLines(run, chart) {
  const keys = new Set(
    (run.evaluations || []).flatMap((e) => Object.keys(e.scores).map((name) => `${e.split}/${name}`)),
  );
  for (const key of keys) {
    const [split, name] = key.split("/");
    const points = run.evaluations.filter((e) => e.split === split && known(e.scores[name]));
    if (isCount(name) || points.length < 2) continue;
    const lines = chart(
      `score-${split}-${name}`,
      `${named(name)}, ${split}`,
      "",
      (value) => scored(name, value),
      RATES.has(name) ? (value) => `${number(value * 100, 3)}\u202f%` : null,
    );
    const best = points.findIndex((point) => point.best);
    lines.push({
      label: run.label,
      css: run.css,
      dots: true,
      best,
      step: points.map((point) => point.step),
      time: sinceStart(
        points.map((point) => point.time),
        originOf(run),
      ),
      mean: points.map((point) => point.scores[name]),
    });
  }
}

/** The last evaluation of each split, and the best one. */
function scoresTable(evaluations) {
  const last = new Map(evaluations.map((evaluation) => [evaluation.split, evaluation]));
  const rows = evaluations.filter(
    (evaluation) => evaluation.best || last.get(evaluation.split) === evaluation,
  );
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.scores)))].filter((name) => !isCount(name));
  if (!names.length) return null;
  return table(
    "Scores",
    ["Data", ">Step", ...names.map((name) => `>${named(name)}`), ""],
    rows.map((row) => [
      row.split,
      whole(row.step),
      ...names.map((name) => scored(name, row.scores[name])),
      row.best ? "◎ best" : "",
    ]),
  );
}

/** The charts' values at some twenty-five steps, as a table. */
function curvesTable(specs) {
  const lines = specs
    .filter((spec) => !spec.lines[0].dots)
    .flatMap((spec) => spec.lines.map((line) => ({ spec, line })));
  if (!lines.length) return h("p", { class: "faint" }, "No step has been done yet.");
  const steps = lines[0].line.step;
  const every = Math.max(1, Math.ceil(steps.length / TABLE_ROWS));
  const chosen = steps.map((_, i) => i).filter((i) => i % every === 0 || i === steps.length - 1);
  const several = specs.some((spec) => spec.lines.length > 1);
  const columns = lines.map(
    ({ spec, line }) =>
      `>${spec.title}${spec.unit ? ` (${spec.unit})` : ""}${several ? `, ${line.label}` : ""}`,
  );
  const value = (line, step) => {
    const i = nearest(line.step, step);
    return i >= 0 && line.step.length ? number(line.mean[i]) : NONE;
  };
  const rows = chosen.map((i) => [whole(steps[i]), ...lines.map(({ line }) => value(line, steps[i]))]);
  return table("Curves as a table", [">Step", ...columns], rows);
}

/** Controls, charts, and the switch between charts and a table. */
class Curves {
  constructor(smooth) {
    this.group = new ChartGroup(smooth);
    this.asTable = false;
    this.table = h("div", { hidden: true });
    this.legend = h("p", { class: "legend" });
    this.group.controls.append(
      choice(
        "Show as",
        [
          [false, "Charts"],
          [true, "Table"],
        ],
        false,
        (on) => {
          this.asTable = on;
          this.show();
        },
      ),
    );
    this.element = h("div", {}, this.group.controls, this.legend, this.group.element, this.table);
  }

  update(runs, marks) {
    this.specs = chartsOf(runs);
    const origin = originOf(runs[0]);
    const placed = (marks || [])
      .filter((mark) => known(mark.step))
      .map((mark) => ({ ...mark, time: known(mark.time) ? mark.time - origin : null }));
    const kinds = [...new Set(placed.map((mark) => mark.kind))];
    const best = this.specs.some((spec) => spec.lines.some((line) => line.best >= 0));
    this.legend.replaceChildren(
      ...kinds.map((kind) =>
        h(
          "span",
          { class: "key" },
          h("span", { class: `glyph mark-${kind}`, "aria-hidden": "true" }, MARK_GLYPHS[kind] || "◆"),
          kind,
        ),
      ),
      ...(best
        ? [h("span", { class: "key" }, h("span", { class: "glyph", "aria-hidden": "true" }, "◎"), "best")]
        : []),
    );
    this.group.update(this.specs, placed);
    this.show();
  }

  show() {
    this.group.element.hidden = this.asTable;
    this.table.hidden = !this.asTable;
    if (this.asTable) replace(this.table, curvesTable(this.specs));
    else this.group.draw();
  }
}
