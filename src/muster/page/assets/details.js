"use strict";
// Examples, what was planned, and what the run was told.

/** One entry per word, so that long stretches can be broken into lines. */
function wordByWord({ op, ref, hyp }) {
  const [above, under] = [ref.split(" "), hyp.split(" ")];
  const length = Math.max(above.length, under.length);
  return Array.from({ length }, (_, i) => ({ op, ref: above[i] || "", hyp: under[i] || "" }));
}

/** Reference above what was recognised, word by word; differing words carry a mark besides their colour. */
function differences(mistake) {
  const words = (mistake.diff || []).flatMap(wordByWord).map(({ op, ref, hyp }) => {
    const above = op === "del" ? h("del", {}, ref) : op === "sub" ? h("s", {}, ref) : ref;
    const under =
      op === "ins" ? h("ins", {}, hyp) : op === "sub" ? h("em", {}, hyp) : op === "same" ? hyp : "";
    return h(
      "span",
      { class: `pair ${op}` },
      h("span", {}, above || "\u00a0"),
      h("span", {}, under || "\u00a0"),
    );
  });
  return h(
    "div",
    { class: "diff", "aria-hidden": "true" },
    h("span", { class: "pair who" }, h("span", {}, "said"), h("span", {}, "heard")),
    words,
  );
}

function player(mistake, source) {
  if (!mistake.audio) return null;
  const address = source.audio(mistake.id);
  if (!address)
    return h("p", { class: "faint" }, "The recording was left out of this file: it is in the run's folder.");
  const audio = h("audio", { preload: "none", src: address });
  const glyph = h("span", { class: "glyph", "aria-hidden": "true" });
  const word = h("span", {});
  const button = h(
    "button",
    {
      type: "button",
      class: "quiet",
      "data-key": `play-${mistake.id}`,
      onclick: () => (audio.paused ? audio.play() : audio.pause()),
    },
    glyph,
    word,
  );
  const place = h("input", {
    type: "range",
    min: 0,
    max: 1,
    step: 0.01,
    value: 0,
    "aria-label": `Place in recording ${mistake.id}`,
  });
  const time = h("span", { class: "faint" });
  const show = () => {
    [glyph.textContent, word.textContent] = audio.paused ? ["▸", "Play"] : ["❙❙", "Pause"];
    const length = known(audio.duration) ? audio.duration : mistake.seconds;
    if (known(length)) place.value = audio.currentTime / length;
    time.textContent = known(length) ? `${audio.currentTime.toFixed(1)} of ${length.toFixed(1)}\u202fs` : "";
  };
  place.addEventListener(
    "input",
    () => known(audio.duration) && (audio.currentTime = place.value * audio.duration),
  );
  audio.addEventListener("error", () => (time.textContent = "this recording cannot be played"));
  for (const event of ["play", "pause", "ended", "timeupdate", "durationchange"])
    audio.addEventListener(event, show);
  show();
  return h("div", { class: "player" }, audio, button, place, time);
}

function mistakeItem(mistake, source) {
  const rate = `${count(mistake.errors, "error")} in ${count(mistake.words, "word")}`;
  return h(
    "li",
    { class: "mistake" },
    h(
      "p",
      { class: "facts" },
      h("b", {}, rate),
      known(mistake.seconds) ? ` · ${duration(mistake.seconds)}` : "",
      h("span", { class: "faint" }, ` · sample ${mistake.id}`),
    ),
    h(
      "p",
      { class: "hidden" },
      `Reference: ${mistake.reference}. Recognised: ${mistake.hypothesis || "nothing"}.`,
    ),
    differences(mistake),
    player(mistake, source),
  );
}

function exampleParts(examples, source) {
  const parts = [];
  if (examples.mistakes.length)
    parts.push(
      h("h3", {}, examples.split ? `Worst mistakes on ${examples.split} data` : "Worst mistakes"),
      h(
        "p",
        { class: "legend" },
        h("span", { class: "key diff" }, h("del", {}, "left out")),
        h("span", { class: "key diff" }, h("ins", {}, "added")),
        h("span", { class: "key diff" }, h("s", {}, "said"), " ", h("em", {}, "heard instead")),
      ),
      h(
        "ol",
        { class: "mistakes" },
        examples.mistakes.map((mistake) => mistakeItem(mistake, source)),
      ),
    );
  if (examples.generated.length)
    parts.push(
      h("h3", {}, "Generated text"),
      h(
        "ol",
        { class: "generated" },
        examples.generated.map((sample) =>
          h(
            "li",
            {},
            h("p", { class: "facts" }, h("b", {}, `Step ${whole(sample.step)}`)),
            h("blockquote", {}, h("span", { class: "prompt" }, sample.prompt), h("span", {}, sample.text)),
            sample.expected
              ? h("p", { class: "facts" }, h("span", { class: "faint" }, "expected: "), sample.expected)
              : null,
          ),
        ),
      ),
    );
  return parts;
}

function plannedTable(planned) {
  const rows = planned.map((line) => {
    const ratio =
      known(line.planned) && known(line.measured) && line.planned ? line.measured / line.planned : null;
    return [
      line.what,
      withUnit(line.planned, line.unit),
      withUnit(line.measured, line.unit),
      ratio === null ? NONE : `${number(ratio, 3)} ×`,
    ];
  });
  return table("Planned and measured", ["", ">Planned", ">Measured", ">Measured / planned"], rows);
}

/** The recipe with a search; keys at their defaults are dimmed and say so. */
class Told {
  constructor() {
    this.search = h("input", {
      type: "search",
      placeholder: "Search keys and values",
      "aria-label": "Search the recipe",
      oninput: () => this.show(),
    });
    this.set = h("input", { type: "checkbox", onchange: () => this.show() });
    this.recipe = h("div", { class: "recipe" });
    this.rest = h("div", {});
    this.found = h("span", { class: "faint", role: "status" });
    this.element = h(
      "div",
      {},
      h(
        "div",
        { class: "controls" },
        this.search,
        h("label", {}, this.set, " only what was set"),
        this.found,
      ),
      this.recipe,
      this.rest,
    );
  }

  update(told) {
    this.told = told;
    this.show();
    const software = Object.entries(told.software || {}).filter(([, value]) => value !== null);
    replace(
      this.rest,
      told.choices.length
        ? [
            h("h3", {}, "What auto came to"),
            table(
              "What auto came to",
              ["Key", "Value", "Why"],
              told.choices.map((row) => [keyed(row.key), shown(row.value), row.reason || ""]),
            ),
          ]
        : null,
      told.environment.length
        ? [
            h("h3", {}, "Environment variables"),
            table(
              "Environment variables",
              ["Name", "Value", "Set by", "Why"],
              told.environment.map((row) => [
                keyed(row.name),
                h("code", {}, shown(row.value)),
                row.by || NONE,
                row.reason || "",
              ]),
            ),
          ]
        : null,
      told.data.length
        ? [
            h("h3", {}, "Data"),
            dataTable(told.data),
            (told.notes || []).map((note) => h("p", { class: "note" }, note)),
          ]
        : null,
      software.length
        ? [
            h("h3", {}, "Software"),
            h(
              "dl",
              { class: "pairs" },
              software.map(([name, value]) => [h("dt", {}, name), h("dd", {}, shown(value))]),
            ),
          ]
        : null,
    );
  }

  show() {
    const wanted = this.search.value.trim().toLowerCase();
    const rows = this.told.recipe.filter(
      (row) =>
        !(this.set.checked && row.default) && `${row.key} ${shown(row.value)}`.toLowerCase().includes(wanted),
    );
    this.found.textContent =
      wanted || this.set.checked ? `${rows.length} of ${this.told.recipe.length} keys` : "";
    replace(
      this.recipe,
      table(
        "Recipe",
        ["Key", "Value", ""],
        rows.map((row) =>
          h(
            "tr",
            { class: row.default ? "default" : null },
            h("td", {}, keyed(row.key)),
            h("td", {}, h("code", {}, shown(row.value))),
            h("td", { class: "faint" }, row.default ? "default" : ""),
          ),
        ),
      ),
    );
  }
}

const DATA_COLUMNS = {
  split: "Split",
  files: "Files",
  samples: "Samples",
  hours: "Hours",
  seconds: "Seconds",
  tokens: "Tokens",
  documents: "Documents",
  dropped: "Left out",
};

function dataTable(rows) {
  const keys = Object.keys(DATA_COLUMNS).filter((key) =>
    rows.some((row) => row[key] !== null && row[key] !== undefined),
  );
  const cell = (row, key) =>
    key === "split"
      ? row[key]
      : key === "hours" || key === "seconds"
        ? number(row[key])
        : known(row[key])
          ? whole(row[key])
          : shown(row[key]);
  return table(
    "Data",
    keys.map((key) => (key === "split" ? "" : ">") + DATA_COLUMNS[key]),
    rows.map((row) => keys.map((key) => cell(row, key))),
  );
}
