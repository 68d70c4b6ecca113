"use strict";
// Runs beside each other: what differs, and their curves overlaid. All are compared with the first.

/** Rows of all comparisons by key: the first run's value and each other's. */
function joined(comparisons, part, key) {
  const rows = new Map();
  comparisons.forEach((comparison, i) => {
    for (const row of comparison[part]) {
      const all = rows.get(row[key]) || { values: [row.a, ...comparisons.map(() => row.a)], ratios: [] };
      all.values[i + 1] = row.b;
      all.ratios[i] = row.ratio;
      rows.set(row[key], all);
    }
  });
  return [...rows];
}

class CompareView {
  constructor() {
    this.curves = new Curves("some");
    this.head = h("div", { class: "head" });
    this.parts = {
      scores: section("scores", "Scores and median speed"),
      curves: section("curves", "Curves", this.curves.element),
      recipe: section("recipe", "Recipe"),
      data: section("data", "Data"),
      environment: section("environment", "Environment"),
    };
    this.element = h(
      "article",
      { class: "view" },
      patterns(),
      this.head,
      Object.values(this.parts).map((part) => part.element),
    );
  }

  update(comparisons) {
    const runs = [comparisons[0].a, ...comparisons.map((comparison) => comparison.b)];
    const names = runs.map((run) => run.name ?? run);
    replace(
      this.head,
      h("h1", {}, names.length === 2 ? "Two runs" : `${names.length} runs`),
      h(
        "ul",
        { class: "compared" },
        runs.map((run, i) =>
          h(
            "li",
            { class: `line-${i}` },
            sample(i),
            h("b", {}, letter(i)),
            h("a", { href: addressOf(names[i]) }, names[i]),
            " ",
            run.state ? stateMark(run.state) : null,
          ),
        ),
      ),
      comparisons.map((comparison, i) =>
        h("p", { class: "note" }, firstDifference(comparison, "A", letter(i + 1))),
      ),
    );
    const curves = [comparisons[0].curves.a, ...comparisons.map((comparison) => comparison.curves.b)];
    this.curves.update(
      curves.map((c, i) => ({ label: letter(i), css: `line-${i}`, curves: c, evaluations: [] })),
      [],
    );
    this.differences("scores", names, [
      ...joined(comparisons, "scores", "name").filter(([name]) => !isCount(name.split(" ").at(-1))),
      ...speeds(comparisons),
    ]);
    for (const part of ["recipe", "data", "environment"]) {
      const key = comparisons.flatMap((comparison) => comparison[part]).some((row) => "key" in row)
        ? "key"
        : "name";
      this.differences(part, names, joined(comparisons, part, key));
    }
  }

  differences(part, names, rows) {
    const { element, body } = this.parts[part];
    element.hidden = part !== "recipe" && !rows.length;
    if (!rows.length) return replace(body, h("p", { class: "faint" }, "Nothing differs."));
    const numeric = part === "scores";
    const value = (name, v) =>
      UNITS[name]
        ? withUnit(v, UNITS[name])
        : numeric
          ? scored(name.split(" ").at(-1), v)
          : h("code", {}, shown(v));
    const columns = numeric
      ? names.flatMap((name, i) => (i ? [`>${letter(i)}`, `>${letter(i)} / A`] : [">A"]))
      : names.map((name, i) => letter(i));
    replace(
      body,
      table(
        part,
        ["", ...columns],
        rows.map(([name, { values, ratios }]) => [
          numeric ? scoreName(name) : keyed(name),
          ...values.flatMap((v, i) =>
            numeric && i
              ? [value(name, v), known(ratios[i - 1]) ? `${number(ratios[i - 1], 3)} ×` : NONE]
              : [value(name, v)],
          ),
        ]),
      ),
    );
  }

  redraw() {
    this.curves.group.draw();
  }
}

/** Samples per second say nothing more where the task counts seconds of audio or tokens. */
function speeds(comparisons) {
  const rows = joined(comparisons, "speed", "name");
  const own = rows.some(([name]) => name === "audio_s_per_s" || name === "tokens_per_s");
  return rows.filter(([name]) => !(own && name === "samples_per_s"));
}

/** `validation wer` as its name and the data. */
function scoreName(name) {
  const [score, ...split] = name.split(" ").reverse();
  return [named(score), ...split].join(", ");
}

const letter = (i) => String.fromCharCode(65 + i);
const sample = (i) =>
  svg(
    "svg",
    { width: 28, height: 8, "aria-hidden": "true" },
    svg("g", { class: `line line-${i}` }, svg("path", { class: "curve", d: "M0 4H28" })),
  );

function firstDifference(comparison, a, b) {
  const first = comparison.first_difference;
  if (!first) return `${a} and ${b} have the same losses at the steps that both did.`;
  return `${named(first.series)} of ${a} and ${b} first differs at step ${whole(first.step)}: ${number(first.a, 9)} and ${number(first.b, 9)}.`;
}
