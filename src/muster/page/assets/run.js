"use strict";
// One run: what to know first, then curves, ranks, examples, and what it was told.

const LEVELS = { bad: "✕", warn: "▲", good: "✓" };

function findingList(findings) {
  return h(
    "ul",
    { class: "findings" },
    findings.map((finding) =>
      h(
        "li",
        { class: finding.level },
        h("span", { class: "glyph", "aria-hidden": "true" }, LEVELS[finding.level] || "·"),
        h("span", { class: "hidden" }, `${finding.level}: `),
        h("span", {}, finding.text),
      ),
    ),
  );
}

function facts(run) {
  const devices = [
    ...new Map((run.devices || []).map((device) => [device.replace(/ \(cuda:\d+\)/, ""), 0])).keys(),
  ];
  const nodes = Array.isArray(run.nodes) ? run.nodes.length : run.nodes;
  return [
    run.task,
    run.model,
    run.strategy,
    run.world ? `${count(run.world, "rank")}${nodes > 1 ? ` on ${nodes} nodes` : ""}` : null,
    devices.length === 1 ? devices[0] : devices.length ? `${devices.length} kinds of device` : null,
    run.precision,
    run.parameters ? `${short(run.parameters)} parameters` : null,
    run.global_batch_size ? `global batch ${whole(run.global_batch_size)}` : null,
    run.rehearsal ? "rehearsal on CPUs" : null,
  ]
    .filter(Boolean)
    .join(" · ");
}

function figures(document) {
  const { run, curves } = document;
  const loss = curves.series.loss?.mean || [];
  const { step, steps } = run.progress;
  const items = [
    ["Step", whole(step), steps ? `of ${whole(steps)}` : ""],
    ["Loss", number(run.loss ?? loss[lastKnown(loss)]), ""],
    run.best
      ? ["Best", scored(run.best.name, run.best.value), `${named(run.best.name).toLowerCase()} at step ${whole(run.best.step)}`]
      : null,
    run.throughput ? ["Speed", number(run.throughput.value), run.throughput.unit] : null,
    [
      "Took",
      duration(run.seconds),
      run.state === "running" && known(run.eta_s) ? `${duration(run.eta_s)} left` : "",
    ],
    run.restarts ? ["Restarts", whole(run.restarts), ""] : null,
  ].filter(Boolean);
  return h(
    "dl",
    { class: "figures" },
    items.map(([name, value, beside]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, value), h("dd", { class: "faint" }, beside)),
    ),
  );
}

class RunView {
  constructor(source) {
    this.source = source;
    this.head = h("div", { class: "head" });
    this.curves = new Curves();
    this.heat = new HeatMap();
    this.told = new Told();
    this.scores = h("div", { class: "scores" });
    this.rankTable = new RankTable();
    this.parts = {
      curves: section("curves", "Curves", this.curves.element, this.scores),
      ranks: section("ranks", "Ranks", this.heat.element, this.rankTable.element),
      planned: section("planned", "Planned and measured"),
      examples: section("examples", "Examples"),
      told: section("told", "What it was told", this.told.element),
    };
    this.menu = h("nav", { class: "menu", "aria-label": "Parts of this page" });
    this.element = h(
      "article",
      { class: "view" },
      patterns(),
      this.head,
      this.menu,
      Object.values(this.parts).map((part) => part.element),
    );
    this.table = null;
  }

  /** Draws again what `keys` of the document name; all of it without them. */
  update(document, keys = Object.keys(document)) {
    this.document = document;
    const changed = (...names) => names.some((name) => keys.includes(name));
    const { parts } = this;
    if (changed("run", "findings", "ranks", "curves")) this.drawHead(document);
    if (changed("curves", "evaluations", "marks")) this.drawCurves(document);
    if (changed("evaluations")) replace(this.scores, scoresTable(document.evaluations));
    if (changed("heat", "ranks")) this.heat.update(document.heat, document.ranks.rows);
    if (changed("ranks", "run")) this.rankTable.update(document.ranks.rows, document.run.state === "running");
    if (changed("planned")) replace(parts.planned.body, plannedTable(document.planned));
    if (changed("examples")) replace(parts.examples.body, ...exampleParts(document.examples, this.source));
    if (changed("told")) this.told.update(document.told);
    parts.planned.element.hidden = !document.planned.length;
    parts.examples.element.hidden = !(
      document.examples.mistakes.length || document.examples.generated.length
    );
    this.drawMenu();
  }

  drawHead(document) {
    const { run } = document;
    // A failure has a box of its own: it is not said twice.
    const findings = document.findings.filter(({ text }) => !(run.words && text.startsWith(run.words)));
    replace(
      this.head,
      h("h1", {}, run.name, " ", stateMark(run.state)),
      h("p", { class: "subtitle" }, facts(run)),
      run.words
        ? h(
            "div",
            { class: "words" },
            h("p", {}, run.words),
            run.cause && run.cause !== run.words ? h("p", {}, run.cause) : null,
            run.cure ? h("p", {}, h("b", {}, "What to do: "), run.cure) : null,
          )
        : null,
      findings.length ? findingList(findings) : null,
      h("div", { class: "glance" }, figures(document), strip(document.ranks.rows)),
    );
  }

  drawCurves(document) {
    this.curves.update(
      [
        {
          label: document.run.name,
          css: "line-0",
          curves: document.curves,
          evaluations: document.evaluations,
        },
      ],
      document.marks,
    );
    const empty = !document.curves.step.length;
    this.curves.element.hidden = empty;
    this.parts.curves.body.querySelector(".empty")?.remove();
    if (empty) this.parts.curves.body.append(h("p", { class: "faint empty" }, "No step has been done yet."));
  }

  drawMenu() {
    const parts = Object.values(this.parts).filter((part) => !part.element.hidden);
    const open = this.menu.childElementCount;
    if (open === parts.length) return;
    this.menu.replaceChildren(
      ...parts.map(({ element }) =>
        h(
          "button",
          { type: "button", class: "quiet", onclick: () => element.scrollIntoView({ behavior: "smooth" }) },
          element.querySelector("h2").textContent,
        ),
      ),
    );
  }

  redraw() {
    this.curves.group.draw();
    this.heat.draw();
  }
}
