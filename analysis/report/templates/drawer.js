"use strict";
// Everything about one head.
headscan.histogramSvg = (counts, width, height, colour) => {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.setAttribute("aria-hidden", "true");
  const most = counts.reduce((a, b) => Math.max(a, b), 1);
  counts.forEach((count, i) => {
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const tall = (count / most) * height;
    bar.setAttribute("x", (i * width) / counts.length);
    bar.setAttribute("y", height - tall);
    bar.setAttribute("width", width / counts.length - 0.5);
    bar.setAttribute("height", tall);
    bar.setAttribute("fill", colour);
    svg.append(bar);
  });
  return svg;
};

headscan.Drawer = class {
  constructor(panel, move) {
    this.panel = panel;
    this.move = move;
    this.ranks = new Map();
    panel.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close();
    });
  }

  open(heads, i, from) {
    if (from) this.from = from;
    const panel = this.panel;
    panel.replaceChildren();
    const top = headscan.element("header");
    top.append(headscan.element("h2", heads.title(i)));
    headscan.button(top, "‹", "Previous head", () => this.move(-1));
    headscan.button(top, "›", "Next head", () => this.move(1));
    const close = headscan.button(top, "Close", "Close (Escape)", () => this.close());
    panel.append(top, ...this.roles(heads, i));
    const groups = new Map();
    for (const measure of heads.measures) {
      if (!groups.has(measure.group)) groups.set(measure.group, []);
      groups.get(measure.group).push(measure);
    }
    for (const [group, measures] of groups) {
      panel.append(headscan.element("h3", group), this.table(heads, i, measures));
    }
    panel.append(headscan.element("p", `Histograms: ${heads.sequences.toLocaleString()} sequences, over the range of`
      + " all heads. Rank: place among the heads, lowest value first.", { class: "note" }));
    const wasHidden = panel.hidden;
    panel.hidden = false;
    panel.scrollTop = 0;
    if (wasHidden) close.focus();
  }

  close() {
    this.panel.hidden = true;
    if (this.from) this.from.focus();
  }

  // Behaviours above their limit, inactive scores, and the arms that ablate the head.
  roles(heads, i) {
    const lines = [];
    for (const measure of heads.measures) {
      const value = heads.column(measure, "values")[i];
      if (measure.limit !== null && value > measure.limit) {
        lines.push(`${measure.name} is ${headscan.number(value)}, above ${measure.limit}`);
      }
    }
    const inactive = heads.measures.filter((each) => each.inactive && heads.column(each, "inactive")[i] >= 0.5);
    if (inactive.length) lines.push(`inactive in most sequences by ${inactive.map((each) => each.name).join(", ")}`);
    const sets = Object.keys(heads.sets).filter((name) => heads.sets[name].includes(i));
    if (sets.length) lines.push(`ablated or removed in ${sets.length} of ${Object.keys(heads.sets).length} arms: ${sets.slice(0, 8).join(", ")}${sets.length > 8 ? ", …" : ""}`);
    if (!lines.length) return [];
    const list = headscan.element("ul");
    lines.forEach((line) => list.append(headscan.element("li", line)));
    return [list];
  }

  table(heads, i, measures) {
    const table = headscan.element("table");
    const spread = measures.some((each) => each.histogram);
    const heading = headscan.element("tr");
    const labels = spread ? ["measure", "mean", "10 % – 90 %", "sequences", "rank"] : ["measure", "value", "", "", "rank"];
    labels.forEach((label, place) => heading.append(headscan.element("th", label, place ? { class: "n" } : {})));
    table.append(heading);
    const theme = headscan.theme();
    for (const measure of measures) {
      const row = headscan.element("tr");
      row.append(headscan.element("td", measure.name, { title: measure.formula }));
      row.append(headscan.element("td", heads.shown(measure, heads.column(measure, "values")[i]), { class: "n" }));
      const low = heads.column(measure, "quantiles", 0);
      const high = heads.column(measure, "quantiles", 2);
      const std = heads.column(measure, "std");
      const range = low ? `${headscan.number(low[i])} – ${headscan.number(high[i])}` : std ? `± ${headscan.number(std[i])}` : "";
      row.append(headscan.element("td", range, { class: "n" }));
      const drawn = headscan.element("td");
      const counts = heads.column(measure, "histogram");
      if (counts) {
        const bins = counts.length / heads.count;
        drawn.append(headscan.histogramSvg(Array.from(counts.subarray(i * bins, (i + 1) * bins)), 72, 18, theme.soft));
      }
      row.append(drawn, headscan.element("td", this.rank(heads, measure, i), { class: "n" }));
      table.append(row);
    }
    return table;
  }

  rank(heads, measure, i) {
    if (measure.scale === "classes") return "";
    const values = heads.column(measure, "values");
    if (!Number.isFinite(values[i])) return "–";
    let lower = 0;
    for (let other = 0; other < values.length; other += 1) lower += values[other] < values[i];
    return `${lower + 1}`;
  }
};
