"use strict";
// The numbers of the heads, decoded when they are first needed, and the state that the views share.
headscan.Heads = class {
  constructor(payload, place) {
    const site = payload.sites[place];
    Object.assign(this, { payload, site: site.name, layer: site.layer, head: site.head, kv: site.kv, sets: site.sets });
    this.sequences = site.sequences;
    this.measures = site.measures;
    this.count = site.layer.length;
    this.byName = new Map(site.measures.map((each) => [each.name, each]));
    this.layers = [...new Set(site.layer)].sort((a, b) => a - b);
    this.rowOf = new Map(this.layers.map((layer, row) => [layer, row]));
    this.columns = 1 + site.head.reduce((a, b) => Math.max(a, b), 0);
    this.at = new Map(site.layer.map((layer, i) => [`${layer}.${site.head[i]}`, i]));
    this.decoded = new Map();
  }

  column(measure, field, index = 0) {
    const key = `${measure.name}/${field}/${index}`;
    if (!this.decoded.has(key)) {
      const text = field === "quantiles" ? measure.quantiles && measure.quantiles[index] : measure[field];
      const read = field === "histogram" ? headscan.bytes : headscan.floats;
      this.decoded.set(key, text ? read(text) : null);
    }
    return this.decoded.get(key);
  }

  // The numbers to draw: of this scan, of the other one, or their difference.
  values(measure, of = "own") {
    const own = this.column(measure, "values");
    const other = measure.other ? this.column(measure, "other") : null;
    if (of === "own" || !other) return own;
    return of === "other" ? other : own.map((value, i) => other[i] - value);
  }

  scale(measure, of, robust) {
    const values = Array.from(this.values(measure, of)).filter(Number.isFinite);
    if (measure.scale === "classes") return { low: 0, high: measure.classes.length - 1, ramp: null };
    if (!values.length) return { low: 0, high: 1, ramp: "viridis" };
    let low = robust ? headscan.quantile(values, 0.01) : values.reduce((a, b) => Math.min(a, b));
    let high = robust ? headscan.quantile(values, 0.99) : values.reduce((a, b) => Math.max(a, b));
    const signed = of === "difference" || measure.scale === "signed";
    if (signed || measure.scale === "ratio") {
      const centre = signed ? 0 : 1;
      // A ratio is never below 0, so its robust scale ends at 0 and 2.
      const widest = Math.max(centre - low, high - centre) || 1;
      const reach = signed ? widest : robust ? Math.min(1, widest) : Math.max(1, widest);
      const ramp = !signed && measure.direction === "low" ? "reversed" : "diverging";
      return { low: centre - reach, high: centre + reach, ramp };
    }
    if (!robust && measure.scale === "share") [low, high] = [0, 1];
    if (low === high) [low, high] = [low - 0.5, high + 0.5];
    return { low, high, ramp: "viridis" };
  }

  colour(scale, value) {
    if (!Number.isFinite(value)) return null;
    if (scale.ramp === null) return headscan.classColours[value];
    const step = Math.round((255 * (value - scale.low)) / (scale.high - scale.low));
    return headscan.ramps[scale.ramp][Math.min(255, Math.max(0, step))];
  }

  shown(measure, value) {
    if (measure.scale === "classes") return measure.classes[value] ?? "–";
    return headscan.number(value);
  }

  name(i) {
    return `${this.layer[i]}.${this.head[i]}`;
  }

  title(i) {
    return `Layer ${this.layer[i]}, head ${this.head[i]} (KV head ${this.kv[i]})`;
  }

  // Heads that match a search: places such as 3.5, L3, H5, KV2, limits such as >0.5, names of classes.
  matches(text, measure, values) {
    const words = text.toLowerCase().replace(/\b(layer|head)\s+(?=\d)/g, (word) => word[0]).split(/[\s,]+/).filter(Boolean);
    if (!words.length) return null;
    const tests = words.map((word) => {
      let found = /^(\d+)[.:](\d+)$/.exec(word);
      if (found) return (i) => this.layer[i] === Number(found[1]) && this.head[i] === Number(found[2]);
      found = /^(l|h|kv)(\d+)$/.exec(word);
      if (found) {
        const column = { l: this.layer, h: this.head, kv: this.kv }[found[1]];
        return (i) => column[i] === Number(found[2]);
      }
      found = /^([<>])=?(-?[\d.]+(?:e-?\d+)?)$/.exec(word);
      if (found) return (i) => (found[1] === ">" ? values[i] > Number(found[2]) : values[i] < Number(found[2]));
      return (i) => measure.scale === "classes" && (measure.classes[values[i]] ?? "").startsWith(word);
    });
    const places = words.every((word) => /^\d+[.:]\d+$/.test(word));
    const all = places ? (i) => tests.some((test) => test(i)) : (i) => tests.every((test) => test(i));
    return new Set(Array.from({ length: this.count }, (_, i) => i).filter(all));
  }

  // The heads that a measure picks first: its inactive end, or the highest values.
  picks(measure, share) {
    const values = this.column(measure, "values");
    const sign = measure.direction === "low" ? 1 : -1;
    const order = Array.from(values.keys()).filter((i) => Number.isFinite(values[i]));
    order.sort((a, b) => sign * (values[a] - values[b]));
    return new Set(order.slice(0, Math.max(1, Math.round(share * order.length))));
  }
};

headscan.fillMeasures = (select, heads, chosen, keep = () => true) => {
  select.replaceChildren();
  const groups = new Map();
  for (const measure of heads.measures.filter(keep)) {
    if (!groups.has(measure.group)) {
      const group = headscan.element("optgroup", null, { label: measure.group });
      groups.set(measure.group, group);
      select.append(group);
    }
    groups.get(measure.group).append(headscan.element("option", measure.name, { value: measure.name }));
  }
  if ([...select.options].some((option) => option.value === chosen)) select.value = chosen;
};

// The map of layers x heads.
headscan.drawMap = (surface, view, width) => {
  const { heads, measure, values, scale, marked, matched, cursor } = view;
  const theme = headscan.theme();
  const size = headscan.mapSize(heads, width);
  const { left, top, wide, high } = size;
  const gap = Math.min(wide, high) > 7 ? 1 : 0;
  for (let i = 0; i < heads.count; i += 1) {
    const x = left + heads.head[i] * wide;
    const y = top + heads.rowOf.get(heads.layer[i]) * high;
    const faded = matched && !matched.has(i);
    surface.rect(x, y, wide - gap, high - gap, heads.colour(scale, values[i]) ?? theme.missing, faded ? 0.13 : 1);
    if (marked && marked.has(i)) {
      surface.frame(x + 1, y + 1, wide - gap - 2, high - gap - 2, theme.mark, Math.min(wide, high) > 12 ? 2 : 1);
    }
    if (wide >= 40 && high >= 18 && measure.scale !== "classes" && Number.isFinite(values[i])) {
      const part = (values[i] - scale.low) / (scale.high - scale.low);
      const pale = scale.ramp === "viridis" ? part > 0.55 : part > 0.15 && part < 0.85;
      surface.text(x + wide / 2, y + high / 2, headscan.shortNumber(Number(values[i].toPrecision(3))), pale ? "#000" : "#fff", "center", 11);
    }
  }
  const everyRow = Math.max(1, Math.ceil(13 / high));
  heads.layers.forEach((layer, row) => {
    if (row % everyRow === 0) surface.text(left - 5, top + (row + 0.5) * high, layer, theme.soft, "right", 11);
  });
  const everyColumn = Math.max(1, Math.ceil(20 / wide));
  for (let column = 0; column < heads.columns; column += everyColumn) {
    surface.text(left + (column + 0.5) * wide, top + heads.layers.length * high + 10, column, theme.soft, "center", 11);
  }
  surface.text(left + (heads.columns * wide) / 2, size.height - 8, "query head", theme.soft, "center", 12);
  surface.text(8, top + (heads.layers.length * high) / 2, "layer", theme.soft, "center", 12, -Math.PI / 2);
  if (cursor !== null && cursor !== undefined) {
    const x = left + heads.head[cursor] * wide;
    const y = top + heads.rowOf.get(heads.layer[cursor]) * high;
    surface.frame(x - 1, y - 1, wide + 1, high + 1, theme.mark, 2);
    surface.frame(x - 2.5, y - 2.5, wide + 4, high + 4, theme.card, 1);
  }
};

headscan.mapSize = (heads, width) => {
  const left = 42;
  const top = 4;
  const wide = Math.min((width - left - 6) / heads.columns, 72);
  const high = Math.min(Math.max(640 / heads.layers.length, 9), 60, Math.max(wide * 1.2, 9));
  return { left, top, wide, high, height: top + heads.layers.length * high + 38 };
};

headscan.headAt = (heads, size, x, y) => {
  const layer = heads.layers[Math.floor((y - size.top) / size.high)];
  return heads.at.get(`${layer}.${Math.floor((x - size.left) / size.wide)}`);
};

headscan.drawLegend = (surface, view, width) => {
  const { measure, scale } = view;
  const theme = headscan.theme();
  if (scale.ramp === null) {
    let x = 0;
    measure.classes.forEach((name, i) => {
      surface.rect(x, 4, 12, 12, headscan.classColours[i]);
      surface.text(x + 17, 10, name, theme.soft, "left", 12);
      x += 34 + 7 * name.length;
    });
    return;
  }
  const bar = Math.min(width - 60, 340);
  for (let i = 0; i < 128; i += 1) {
    surface.rect(30 + (i * bar) / 128, 2, bar / 128 + 0.5, 11, headscan.ramps[scale.ramp][2 * i]);
  }
  headscan.ticks(scale.low, scale.high, 4).forEach((tick) => {
    const x = 30 + (bar * (tick - scale.low)) / (scale.high - scale.low);
    surface.line(x, 13, x, 17, theme.soft);
    surface.text(x, 24, headscan.shortNumber(tick), theme.soft, "center", 11);
  });
};

// The whole map with its title and scale as one SVG.
headscan.mapSvg = (view) => {
  const theme = headscan.theme();
  const width = Math.max(520, Math.min(1100, 48 + 40 * view.heads.columns));
  const size = headscan.mapSize(view.heads, width);
  const map = headscan.onSvg(width, size.height, theme.card);
  headscan.drawMap(map, { ...view, cursor: null }, width);
  const legend = headscan.onSvg(width, 34, theme.card);
  headscan.drawLegend(legend, view, width);
  const title = headscan.onSvg(width, 26, theme.card);
  title.text(8, 13, view.title, theme.ink, "left", 14);
  const place = (svg, y) => String(svg).replace("<svg ", `<svg y="${y}" `);
  const height = 26 + size.height + 34;
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}">`
    + `${place(title, 0)}${place(map, 26)}${place(legend, 26 + size.height)}</svg>`;
};

// The table next to the map: sorted, searched, a page of rows at a time.
headscan.HeadTable = class {
  constructor(table, choose) {
    Object.assign(this, { table, choose, most: 100, sorted: { column: "value", rising: null } });
  }

  columns(view) {
    const { heads, measure } = view;
    const own = view.of === "own";
    const found = [
      { key: "head", label: "head", value: (i) => 1000 * heads.layer[i] + heads.head[i], text: (i) => heads.name(i) },
      { key: "kv", label: "KV", value: (i) => heads.kv[i], text: (i) => heads.kv[i] },
      { key: "value", label: view.of === "difference" ? "difference" : "value", value: (i) => view.values[i],
        text: (i) => heads.shown(measure, view.values[i]) },
    ];
    const std = own ? heads.column(measure, "std") : null;
    if (std) found.push({ key: "std", label: "± std", value: (i) => std[i], text: (i) => headscan.number(std[i]) });
    const inactive = own ? heads.column(measure, "inactive") : null;
    if (inactive) {
      found.push({ key: "inactive", label: "inactive", value: (i) => inactive[i], text: (i) => headscan.percent(inactive[i]) });
    }
    return found;
  }

  order(view) {
    const columns = this.columns(view);
    const by = columns.find((each) => each.key === this.sorted.column) ?? columns[2];
    const rising = this.sorted.rising ?? (by.key === "value" ? view.measure.direction === "low" : by.key !== "inactive");
    const rows = Array.from({ length: view.heads.count }, (_, i) => i).filter((i) => !view.matched || view.matched.has(i));
    const keys = rows.length ? Float64Array.from({ length: view.heads.count }, (_, i) => by.value(i)) : [];
    const sign = rising ? 1 : -1;
    rows.sort((a, b) => {
      if (Number.isNaN(keys[a]) || Number.isNaN(keys[b])) return Number.isNaN(keys[a]) - Number.isNaN(keys[b]);
      return sign * (keys[a] - keys[b]) || a - b;
    });
    return { rows, columns, by, rising };
  }

  draw(view) {
    this.view = view;
    const { rows, columns, by, rising } = this.order(view);
    const line = headscan.element("tr");
    for (const column of columns) {
      const heading = headscan.element("th", null, { scope: "col" });
      if (column === by) heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
      const button = headscan.element("button", `${column.label}${column === by ? (rising ? " ▲" : " ▼") : ""}`,
        { type: "button", title: `Sort by ${column.label}` });
      button.addEventListener("click", () => {
        this.sorted = { column: column.key, rising: column === by ? !rising : null };
        this.draw(this.view);
      });
      heading.append(button);
      line.append(heading);
    }
    this.table.tHead.replaceChildren(line);
    const body = document.createDocumentFragment();
    for (const i of rows.slice(0, this.most)) body.append(this.row(i, columns, view));
    this.table.tBodies[0].replaceChildren(body);
    this.rows = rows;
  }

  row(i, columns, view) {
    const row = headscan.element("tr");
    if (i === view.cursor) row.className = "chosen";
    columns.forEach((column, place) => {
      const cell = headscan.element("td");
      if (place === 0) {
        const button = headscan.element("button", column.text(i), { type: "button", title: view.heads.title(i) });
        cell.append(button);
      } else {
        cell.textContent = column.text(i);
      }
      row.append(cell);
    });
    row.addEventListener("click", () => this.choose(i));
    return row;
  }
};

// The numbers of the map in its shape: a row for each layer, a column for each head.
headscan.mapRows = (view) => {
  const { heads, measure, values } = view;
  const columns = Array.from({ length: heads.columns }, (_, column) => column);
  return [["layer", ...columns.map((column) => `head ${column}`)],
    ...heads.layers.map((layer) => [layer, ...columns.map((column) => {
      const i = heads.at.get(`${layer}.${column}`);
      if (i === undefined) return null;
      return measure.scale === "classes" ? measure.classes[values[i]] ?? null : values[i];
    })])];
};

// All measures of the rows in order, for a file.
headscan.allNumbers = (view, rows) => {
  const { heads } = view;
  const columns = heads.measures.map((each) => [each, heads.column(each, "values")]);
  return [
    ["layer", "head", "kv_head", ...heads.measures.map((each) => each.name)],
    ...rows.map((i) => [heads.layer[i], heads.head[i], heads.kv[i],
      ...columns.map(([each, values]) => (each.scale === "classes" ? each.classes[values[i]] ?? "" : values[i]))]),
  ];
};

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
