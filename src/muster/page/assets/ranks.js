"use strict";
// Ranks: a strip that is seen at a glance, and the table.

const PARTS = [
  ["compute", "computing"],
  ["wait", "waiting for others"],
  ["data", "waiting for data"],
];
const RANK_STATES = {
  ok: ["", ""],
  slow: ["▲", "slow"],
  idle: ["○", "idle"],
  silent: ["…", "silent"],
  failed: ["✕", "failed"],
  ended: ["", "ended"],
};

function rankMark(state) {
  const [glyph, word] = RANK_STATES[state] || ["?", state];
  return word
    ? h("span", { class: `mark ${state}` }, h("span", { class: "glyph", "aria-hidden": "true" }, glyph), word)
    : "";
}

const median = (values) => {
  const sorted = values.filter(known).sort((a, b) => a - b);
  return sorted.length ? (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2 : null;
};

/** The patterns that tell the parts of a bar apart without colours. */
function patterns() {
  const pattern = (id, ...shapes) =>
    svg(
      "pattern",
      { id, width: 5, height: 5, patternUnits: "userSpaceOnUse" },
      svg("rect", { width: 5, height: 5, class: "ground" }),
      ...shapes,
    );
  return svg(
    "svg",
    { width: 0, height: 0, class: "defs", "aria-hidden": "true" },
    svg(
      "defs",
      {},
      pattern("fill-wait", svg("path", { d: "M-1 6L6 -1M-1 1L1 -1M4 6L6 4" })),
      pattern("fill-data", svg("circle", { cx: 2.5, cy: 2.5, r: 1.1 })),
    ),
  );
}

const seconds = (row) => PARTS.map(([part]) => row[`${part}_s`] || 0);

function partsKey() {
  return h(
    "p",
    { class: "legend" },
    PARTS.map(([part, words]) =>
      h(
        "span",
        { class: "key" },
        svg(
          "svg",
          { width: 14, height: 10, "aria-hidden": "true" },
          svg("rect", { class: part, width: 14, height: 10 }),
        ),
        words,
      ),
    ),
  );
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
  return svg(
    "svg",
    { class: "bar", height: 10, role: "img", "aria-label": words },
    svg("title", {}, words),
    rects,
  );
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
      return svg("rect", {
        class: PARTS[part][0],
        x: i * width,
        y,
        width: width - (width > 6 ? 2 : 1),
        height: tall,
      });
    });
    const [glyph] = RANK_STATES[row.state] || ["?"];
    return svg(
      "g",
      {},
      svg(
        "title",
        {},
        `rank ${row.rank}: ${PARTS.map(([p, w]) => `${w} ${withUnit(row[`${p}_s`], "s")}`).join(", ")}`,
      ),
      rects,
      glyph
        ? svg(
            "text",
            { class: row.state, x: i * width + width / 2 - 0.5, y: -4, "text-anchor": "middle" },
            glyph,
          )
        : null,
      glyph || rows.length <= 16
        ? svg(
            "text",
            { class: "rank", x: i * width + width / 2 - 0.5, y: height + 12, "text-anchor": "middle" },
            row.rank,
          )
        : null,
    );
  });
  const box = `0 -14 ${rows.length * width} ${height + 28}`;
  return h(
    "figure",
    { class: "strip" },
    svg(
      "svg",
      {
        viewBox: box,
        width: rows.length * width,
        height: height + 28,
        role: "img",
        "aria-label": "What each rank does of a step; the table of ranks has the numbers",
      },
      columns,
    ),
    h("figcaption", {}, "A step of each rank, from its last steps", partsKey()),
  );
}

const shortDevice = (device) => (device || "").replace(/^(NVIDIA|AMD) /, "");

function gauge(share, words) {
  if (!known(share)) return NONE;
  return h(
    "span",
    { class: "gauge" },
    words,
    svg(
      "svg",
      { height: 4, "aria-hidden": "true" },
      svg("rect", { class: "track", width: "100%", height: 4 }),
      svg("rect", { class: "level", width: `${Math.min(100, Math.max(0, share * 100))}%`, height: 4 }),
    ),
  );
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
    replace(
      this.element,
      rows.length
        ? [partsKey(), rankTable(this.all || !more ? rows : first, live)]
        : h("p", { class: "faint" }, "No rank has said anything yet."),
      more
        ? h(
            "p",
            { class: "note" },
            h(
              "button",
              { type: "button", class: "quiet", onclick: press, "data-key": "more" },
              this.all ? "Show fewer ranks" : `Show all ${rows.length} ranks`,
            ),
          )
        : null,
    );
  }
}

/** Columns nothing is known of are left out, and the step where all ranks are at the same. */
function rankTable(rows, live) {
  const longest = Math.max(...rows.map((row) => seconds(row).reduce((a, b) => a + b)));
  const memory = (row) =>
    known(row.memory_total_gib)
      ? gauge(
          row.memory_gib / row.memory_total_gib,
          `${number(row.memory_gib, 3)} of ${number(row.memory_total_gib, 3)}`,
        )
      : number(row.memory_gib, 3);
  const all = [
    [">Rank", (row) => row.rank, () => true],
    [
      "",
      (row) => (row.state === "ended" && !live ? "" : rankMark(row.state)),
      (row) => row.state !== "ok" && row.state !== "ended",
    ],
    ["Node", (row) => row.node, (row) => row.node],
    ["Device", (row) => shortDevice(row.device), (row) => row.device],
    [">Step", (row) => whole(row.step), (row) => row.step !== rows[0].step],
    ["Doing", (row) => row.phase, (row) => live && row.phase],
    [">Computing", (row) => withUnit(row.compute_s, "s"), (row) => known(row.compute_s)],
    ["Of a step", (row) => bar(row, longest), (row) => known(row.compute_s)],
    [">Busy", (row) => gauge(row.utilisation, percent(row.utilisation)), (row) => known(row.utilisation)],
    [">Memory, GiB", memory, (row) => known(row.memory_gib)],
    [
      ">Power",
      (row) => withUnit(known(row.power_w) ? Math.round(row.power_w) : null, "W"),
      (row) => known(row.power_w),
    ],
    [
      ">Temp.",
      (row) => withUnit(known(row.temperature_c) ? Math.round(row.temperature_c) : null, "°C"),
      (row) => known(row.temperature_c),
    ],
    [">Silent", (row) => duration(row.silent_s), (row) => live && row.silent_s > 5],
  ];
  const columns = all.filter(([, , present]) => rows.some(present));
  const lines = rows.map((row, i) =>
    h(
      "tr",
      { class: row.state, tabindex: i ? "-1" : "0", "data-key": `rank-${row.rank}` },
      columns.map(([title, cell]) =>
        h(
          "td",
          { class: title.startsWith(">") ? "n" : null, "data-title": title.replace(">", "") },
          cell(row),
        ),
      ),
    ),
  );
  return table(
    "Ranks",
    columns.map(([title]) => title),
    lines,
    { class: "ranks" },
  );
}
