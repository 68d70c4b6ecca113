"use strict";
// The list of runs: filter, sort, choose some to compare.

const addressOf = (name) => `#/run/${encodeURIComponent(name)}`;
const compareAddress = (names) => `#/compare/${names.map(encodeURIComponent).join("/")}`;

const RUN_COLUMNS = [
  ["State", (run) => run.state, (run) => stateMark(run.state)],
  [
    "Run",
    (run) => run.name,
    (run) => h("a", { href: addressOf(run.name), "data-key": `run-${run.name}` }, run.name),
  ],
  ["Task", (run) => run.task, (run) => run.task],
  ["Model", (run) => run.model, (run) => run.model],
  ["Strategy", (run) => run.strategy, (run) => run.strategy],
  [">Ranks", (run) => run.world, (run) => whole(run.world)],
  ["Progress", (run) => shareDone(run.progress), (run) => progressBar(run)],
  [">Best score", (run) => run.best?.value, (run) => bestScore(run.best)],
  [
    ">Speed",
    (run) => run.throughput?.value,
    (run) => (run.throughput ? withUnit(run.throughput.value, run.throughput.unit) : NONE),
  ],
  [">Took", (run) => run.seconds, (run) => duration(run.seconds)],
  [">Began", (run) => run.created, (run) => date(run.created)],
];

const shareDone = (progress) => (progress.steps ? progress.step / progress.steps : 0);

function bestScore(best) {
  return best
    ? [h("b", {}, scored(best.name, best.value)), h("span", { class: "faint" }, ` ${named(best.name).toLowerCase()}`)]
    : NONE;
}

function progressBar(run) {
  const { step, steps } = run.progress;
  const share = Math.min(1, shareDone(run.progress));
  return h(
    "span",
    { class: "progress" },
    h("span", {}, whole(step), h("span", { class: "faint" }, steps ? ` of ${whole(steps)}` : "")),
    svg(
      "svg",
      {
        height: 3,
        role: "progressbar",
        "aria-valuenow": Math.round(share * 100),
        "aria-valuemin": 0,
        "aria-valuemax": 100,
        "aria-label": "steps done",
      },
      svg("rect", { class: "track", width: "100%", height: 3 }),
      svg("rect", { class: "level", width: `${share * 100}%`, height: 3 }),
    ),
  );
}

class RunsView {
  constructor() {
    Object.assign(this, { runs: [], chosen: new Set(), sort: [">Began", -1] });
    this.filter = h("input", {
      type: "search",
      placeholder: "Filter by name, state, task, model …",
      "aria-label": "Filter the runs",
      oninput: () => this.show(),
    });
    this.compare = h("a", { class: "button", role: "link" }, "Compare");
    this.hint = h("span", { class: "faint" });
    this.list = h("div", { class: "runs" });
    this.element = h(
      "div",
      { class: "view wide" },
      h("h1", {}, "Runs"),
      h("div", { class: "controls" }, this.filter, this.compare, this.hint),
      this.list,
    );
    arrowKeys(this.list, "tbody a");
  }

  update(document) {
    this.runs = document.runs;
    this.show();
  }

  rows() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const [title, direction] = this.sort;
    const value = RUN_COLUMNS.find(([t]) => t === title)[1];
    const order = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === y) return 0;
      if (x === null || x === undefined) return 1;
      if (y === null || y === undefined) return -1;
      return (x < y ? -1 : 1) * direction;
    };
    return this.runs
      .filter((run) => {
        const text = [run.name, run.state, run.task, run.model, run.strategy, run.words]
          .join(" ")
          .toLowerCase();
        return words.every((word) => text.includes(word));
      })
      .sort(order);
  }

  show() {
    const rows = this.rows();
    const head = RUN_COLUMNS.map(([title]) => {
      const sorted = this.sort[0] === title ? (this.sort[1] > 0 ? "ascending" : "descending") : null;
      const press = () => {
        this.sort = [title, sorted ? -this.sort[1] : 1];
        this.show();
      };
      return h(
        "th",
        { scope: "col", class: title.startsWith(">") ? "n" : null, "aria-sort": sorted },
        h(
          "button",
          { type: "button", class: "sort", onclick: press, "data-key": `sort-${title}` },
          title.replace(">", ""),
          h("span", { "aria-hidden": "true" }, sorted ? (this.sort[1] > 0 ? " ↑" : " ↓") : ""),
        ),
      );
    });
    const body = rows.map((run) => [
      h(
        "tr",
        { class: run.words ? "worded" : null },
        h("td", { class: "pick" }, this.box(run)),
        RUN_COLUMNS.map(([title, , cell]) =>
          h(
            "td",
            { class: title.startsWith(">") ? "n" : null, "data-title": title.replace(">", "") },
            cell(run),
          ),
        ),
      ),
      run.words
        ? h("tr", { class: "words" }, h("td", {}), h("td", { colspan: RUN_COLUMNS.length }, run.words))
        : null,
    ]);
    replace(
      this.list,
      this.runs.length === 0
        ? h("p", { class: "faint" }, "There are no runs here yet.")
        : h(
            "div",
            { class: "scroll" },
            h(
              "table",
              {},
              h("caption", { class: "hidden" }, "Runs"),
              h(
                "thead",
                {},
                h("tr", {}, h("th", { class: "pick" }, h("span", { class: "hidden" }, "Chosen")), head),
              ),
              h("tbody", {}, body.flat().filter(Boolean)),
            ),
          ),
      this.runs.length && !rows.length ? h("p", { class: "faint" }, "No run matches the filter.") : null,
    );
    this.button();
  }

  box(run) {
    return h("input", {
      type: "checkbox",
      checked: this.chosen.has(run.name),
      "aria-label": `Choose ${run.name} to compare`,
      "data-key": `pick-${run.name}`,
      onchange: (event) => {
        if (event.target.checked) this.chosen.add(run.name);
        else this.chosen.delete(run.name);
        this.button();
      },
    });
  }

  button() {
    const names = this.runs.map((run) => run.name).filter((name) => this.chosen.has(name));
    this.compare.textContent = names.length > 2 ? `Compare ${names.length} runs` : "Compare two runs";
    if (names.length >= 2)
      this.compare.setAttribute(
        "href",
        compareAddress([...this.chosen].filter((name) => names.includes(name))),
      );
    else this.compare.removeAttribute("href");
    this.compare.setAttribute("aria-disabled", String(names.length < 2));
    this.hint.textContent =
      names.length < 2 ? (names.length ? "choose one more" : "choose two in the list") : "";
  }
}
