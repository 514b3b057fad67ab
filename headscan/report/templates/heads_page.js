"use strict";
// Distribution of the selected measure, with the thresholds of its rules.
headscan.drawDistribution = (surface, view, width, height) => {
  const { heads, measure } = view;
  const theme = headscan.theme();
  const own = Array.from(view.values).filter(Number.isFinite);
  const pooled = view.of === "own" && measure.pool;
  let low = pooled ? measure.low : own.reduce((a, b) => Math.min(a, b), Infinity);
  let high = pooled ? measure.high : own.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!(high > low)) [low, high] = [low - 0.5, high + 0.5];
  const bins = pooled ? measure.pool.length : 60;
  const means = new Array(bins).fill(0);
  own.forEach((value) => {
    means[Math.min(bins - 1, Math.max(0, Math.floor((bins * (value - low)) / (high - low))))] += 1;
  });
  const left = 46;
  const right = width - 14;
  const bottom = height - 36;
  const x = (value) => left + ((right - left) * (value - low)) / (high - low);
  const draw = (counts, fill, opacity) => {
    const total = counts.reduce((a, b) => a + b, 0) || 1;
    const most = counts.reduce((a, b) => Math.max(a, b), 0) / total || 1;
    counts.forEach((count, i) => {
      const tall = ((bottom - 26) * (count / total)) / most;
      if (count) surface.rect(left + (i * (right - left)) / bins, bottom - tall, (right - left) / bins - 0.5, tall, fill, opacity);
    });
  };
  const [wide, narrow] = theme.dark ? ["#4a78ad", "#e8a94a"] : ["#9dbfe0", "#b35806"];
  if (pooled) draw(measure.pool, wide, 1);
  draw(means, pooled ? narrow : wide, pooled ? 0.55 : 1);
  surface.line(left, bottom, right, bottom, theme.soft);
  headscan.ticks(low, high, Math.max(3, Math.round(width / 110))).forEach((tick) => {
    surface.line(x(tick), bottom, x(tick), bottom + 4, theme.soft);
    surface.text(x(tick), bottom + 13, headscan.shortNumber(tick), theme.soft, "center", 11);
  });
  surface.text((left + right) / 2, height - 8, measure.unit && measure.unit !== "ratio" ? `${measure.name}, ${measure.unit}` : measure.name, theme.soft, "center", 12);
  const limits = (pooled ? measure.thresholds : []).map(([share, value]) => [`${Math.round(100 * share)} %`, value]);
  if (measure.limit !== null && view.of === "own") limits.push(["limit", measure.limit]);
  limits.forEach(([label, value], place) => {
    if (value < low || value > high) return;
    surface.line(x(value), 12 + 7 * (place % 3), x(value), bottom, theme.ink, [4, 3]);
    surface.text(x(value) + 3, 10 + 9 * (place % 3), label, theme.ink, "left", 10);
  });
  return heads;
};

headscan.distributionNote = (view) => {
  const { measure, heads } = view;
  if (measure.scale === "classes") return "Classes have no distribution.";
  if (view.of !== "own" || !measure.pool) return `${heads.count.toLocaleString()} heads.`;
  const limits = measure.thresholds.map(([share, value]) => `${Math.round(100 * share)} %: ${headscan.number(value)}`);
  const rule = limits.length ? ` Dashed: thresholds beyond which a rule ablates that share of them (${limits.join("; ")}).` : "";
  return `Blue: all (sequence, head) of the scan; orange: the means of the ${heads.count.toLocaleString()} heads. Each is scaled to its own highest bar, and the outermost bars hold the values beyond.${rule}`;
};

headscan.distributionRows = (view) => {
  const { measure } = view;
  if (view.of !== "own" || !measure.pool) {
    return [["layer", "head", measure.name], ...Array.from(view.values, (value, i) => [view.heads.layer[i], view.heads.head[i], value])];
  }
  const step = (measure.high - measure.low) / measure.pool.length;
  return [["from", "to", "count"], ...measure.pool.map((count, i) => [measure.low + i * step, measure.low + (i + 1) * step, count])];
};

// One measure over another, with the heads that each picks.
headscan.scatterColours = () => {
  const dark = headscan.theme().dark;
  return { both: "#d55e00", x: dark ? "#56b4e9" : "#0072b2", y: dark ? "#2bc79b" : "#008060", none: dark ? "#6b727d" : "#b4b9c1" };
};

headscan.drawScatter = (surface, view, width, height) => {
  const { heads, across, up, sets } = view;
  const theme = headscan.theme();
  const colours = headscan.scatterColours();
  const xs = heads.column(across, "values");
  const ys = heads.column(up, "values");
  const both = Array.from(xs.keys()).filter((i) => Number.isFinite(xs[i]) && Number.isFinite(ys[i]));
  const range = (values) => {
    const low = both.reduce((least, i) => Math.min(least, values[i]), Infinity);
    const high = both.reduce((most, i) => Math.max(most, values[i]), -Infinity);
    const room = 0.04 * (high - low) || 0.5;
    return [low - room, high + room];
  };
  const [left, right, top, bottom] = [62, width - 12, 8, height - 44];
  const [[x0, x1], [y0, y1]] = [range(xs), range(ys)];
  const x = (value) => left + ((right - left) * (value - x0)) / (x1 - x0);
  const y = (value) => bottom - ((bottom - top) * (value - y0)) / (y1 - y0);
  headscan.ticks(x0, x1, Math.max(3, Math.round(width / 120))).forEach((tick) => {
    surface.line(x(tick), top, x(tick), bottom, theme.line);
    surface.text(x(tick), bottom + 11, headscan.shortNumber(tick), theme.soft, "center", 11);
  });
  headscan.ticks(y0, y1, 5).forEach((tick) => {
    surface.line(left, y(tick), right, y(tick), theme.line);
    surface.text(left - 5, y(tick), headscan.shortNumber(tick), theme.soft, "right", 11);
  });
  surface.text((left + right) / 2, height - 14, across.name, theme.ink, "center", 12);
  surface.text(12, (top + bottom) / 2, up.name, theme.ink, "center", 12, -Math.PI / 2);
  const radius = heads.count > 2000 ? 2 : heads.count > 300 ? 3 : 4.5;
  const places = [];
  for (const kind of ["none", "x", "y", "both"]) {
    for (const i of both) {
      if (headscan.pickedBy(sets, i) !== kind) continue;
      surface.dot(x(xs[i]), y(ys[i]), radius, colours[kind], 0.8);
      places.push([x(xs[i]), y(ys[i]), i]);
    }
  }
  return places;
};

headscan.pickedBy = (sets, i) => {
  const [inX, inY] = [sets.x.has(i), sets.y.has(i)];
  return inX && inY ? "both" : inX ? "x" : inY ? "y" : "none";
};

headscan.picksNote = (place, view) => {
  const { across, up, sets } = view;
  const shared = [...sets.x].filter((i) => sets.y.has(i)).length;
  const union = sets.x.size + sets.y.size - shared;
  const colours = headscan.scatterColours();
  const end = (measure) => (measure.direction === "low" ? "lowest" : "highest");
  const parts = [
    [colours.x, `only ${across.name} (${end(across)} values): ${sets.x.size - shared}`],
    [colours.y, `only ${up.name} (${end(up)} values): ${sets.y.size - shared}`],
    [colours.both, `both: ${shared}, ${headscan.percent(shared / union)} of the heads that either picks`],
  ];
  place.replaceChildren();
  for (const [colour, text] of parts) {
    const swatch = headscan.element("span", null, { class: "swatch" });
    swatch.style.background = colour;
    place.append(swatch, text);
  }
};

headscan.scatterRows = (view) => {
  const { heads, across, up, sets } = view;
  const [xs, ys] = [heads.column(across, "values"), heads.column(up, "values")];
  return [["layer", "head", across.name, up.name, "picked by"],
    ...Array.from(xs, (value, i) => [heads.layer[i], heads.head[i], value, ys[i],
      { x: across.name, y: up.name, both: "both", none: "" }[headscan.pickedBy(sets, i)]])];
};

// Ties the controls of the page to the map, the table, the drawer and the two charts below.
headscan.startHeads = async () => {
  const source = document.getElementById("head-data");
  if (!source) return;
  const payload = JSON.parse(await headscan.unpacked("head-data"));
  source.remove();
  const find = (id) => document.getElementById(id);
  const [canvas, tip] = [find("map"), find("tip")];
  const view = { cursor: null, of: "own" };
  let size = null;
  let dots = [];
  const tables = [];

  const drawMap = () => {
    const width = find("map-figure").clientWidth;
    size = headscan.mapSize(view.heads, width);
    headscan.drawMap(headscan.onCanvas(canvas, width, size.height), view, width);
    canvas.setAttribute("aria-label", `Map of ${view.title}: ${view.heads.layers.length} layers, ${view.heads.columns} heads`);
    const legend = headscan.onSvg(Math.min(width, 420), 34);
    headscan.drawLegend(legend, view, Math.min(width, 420));
    find("legend").innerHTML = legend.toString();
  };
  const drawTable = () => {
    table.draw(view);
    find("rows-shown").textContent = `${Math.min(table.most, table.rows.length)} of ${table.rows.length.toLocaleString()} heads`;
  };
  const drawDistribution = () => {
    find("distribution-note").textContent = headscan.distributionNote(view);
    if (find("distribution").hidden) return;
    const width = find("distribution").clientWidth;
    const drawn = view.measure.scale !== "classes";
    const svg = headscan.onSvg(width, 220);
    if (drawn) headscan.drawDistribution(svg, view, width, 220);
    find("distribution").innerHTML = drawn ? svg.toString() : "";
  };
  const drawScatter = () => {
    const width = find("scatter-figure").clientWidth;
    const height = Math.min(440, Math.max(300, 0.6 * width));
    const scatter = { heads: view.heads, across: view.heads.byName.get(find("across").value), up: view.heads.byName.get(find("up").value) };
    if (!scatter.across || !scatter.up) return;
    const share = Number(find("picked").value);
    scatter.sets = { x: view.heads.picks(scatter.across, share), y: view.heads.picks(scatter.up, share) };
    view.scatter = scatter;
    headscan.picksNote(find("picks"), scatter);
    tables.forEach((fill) => fill());
    if (find("scatter-figure").hidden) return;
    dots = headscan.drawScatter(headscan.onCanvas(find("scatter"), width, height), scatter, width, height);
  };

  const update = () => {
    const { heads } = view;
    const measure = heads.byName.get(find("measure").value);
    view.measure = measure;
    view.of = measure.other ? find("shown-run").value : "own";
    view.values = heads.values(measure, view.of);
    view.scale = heads.scale(measure, view.of, find("scale").value === "robust");
    view.marked = find("marked").value ? new Set(heads.sets[find("marked").value]) : null;
    view.matched = heads.matches(find("search").value, measure, view.values);
    view.title = `${measure.name}${{ own: "", other: ", other scan", difference: ", difference" }[view.of]}`;
    const end = measure.direction ? ` The ${measure.direction} end is inactive.` : "";
    find("definition").textContent = `${measure.name}: ${measure.formula}${measure.unit ? ` [${measure.unit}]` : ""}.${end}`;
    drawMap();
    drawTable();
    drawDistribution();
    tables.forEach((fill) => fill());
  };

  const choose = (i, from) => {
    view.cursor = i;
    drawMap();
    drawTable();
    drawer.open(view.heads, i, from);
  };
  const table = new headscan.HeadTable(find("head-table"), (i) => choose(i, canvas));
  const drawer = new headscan.Drawer(find("drawer"), (step) =>
    choose((view.cursor + step + view.heads.count) % view.heads.count));

  const setSite = () => {
    view.heads = new headscan.Heads(payload, Number(find("site").value || 0));
    view.cursor = null;
    headscan.fillMeasures(find("measure"), view.heads, view.heads.byName.has(find("measure").value) ? find("measure").value : payload.start);
    const plain = (measure) => measure.scale !== "classes";
    const names = view.heads.measures.filter(plain).map((each) => each.name);
    const wanted = ["importance", "first_token_weight", "entropy", ...names].find((name) => names.includes(name) && name !== payload.start);
    headscan.fillMeasures(find("across"), view.heads, payload.start, plain);
    headscan.fillMeasures(find("up"), view.heads, wanted, plain);
    find("marked").replaceChildren(headscan.element("option", "no set", { value: "" }),
      ...Object.keys(view.heads.sets).map((name) => headscan.element("option", `${name} (${view.heads.sets[name].length})`, { value: name })));
    find("marked").parentElement.hidden = !Object.keys(view.heads.sets).length;
    update();
    drawScatter();
  };

  const showTip = (i, x, y) => {
    tip.hidden = i === undefined;
    if (i === undefined) return;
    tip.textContent = `${view.heads.title(i)}\n${view.title}: ${view.heads.shown(view.measure, view.values[i])}`;
    tip.style.left = `${Math.min(x + 14, innerWidth - 270)}px`;
    tip.style.top = `${Math.min(y + 14, innerHeight - 60)}px`;
  };
  const under = (event) => {
    const box = canvas.getBoundingClientRect();
    return headscan.headAt(view.heads, size, event.clientX - box.left, event.clientY - box.top);
  };
  canvas.addEventListener("pointermove", (event) => showTip(under(event), event.clientX, event.clientY));
  canvas.addEventListener("pointerleave", () => showTip(undefined));
  canvas.addEventListener("click", (event) => {
    const i = under(event);
    if (i !== undefined) choose(i, canvas);
  });
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "Enter" && view.cursor !== null) {
      event.preventDefault();  // the key would press the button that gets the focus, which closes the drawer
      choose(view.cursor, canvas);
    }
    if (!steps) return;
    event.preventDefault();
    const { heads } = view;
    const now = view.cursor ?? 0;
    const row = heads.rowOf.get(heads.layer[now]) + (view.cursor === null ? 0 : steps[0]);
    const next = heads.at.get(`${heads.layers[row]}.${heads.head[now] + (view.cursor === null ? 0 : steps[1])}`);
    if (next === undefined) return;
    view.cursor = next;
    drawMap();
    const box = canvas.getBoundingClientRect();
    showTip(next, box.left + size.left + (heads.head[next] + 1) * size.wide, box.top + size.top + (row + 1) * size.high);
  });
  canvas.addEventListener("blur", () => showTip(undefined));
  const nearest = (event) => {
    const box = find("scatter").getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const away = (dot) => (dot[0] - x) ** 2 + (dot[1] - y) ** 2;
    const best = dots.reduce((a, b) => (away(b) < away(a) ? b : a), [Infinity, Infinity, undefined]);
    return away(best) < 100 ? best[2] : undefined;
  };
  find("scatter").addEventListener("pointermove", (event) => showTip(nearest(event), event.clientX, event.clientY));
  find("scatter").addEventListener("pointerleave", () => showTip(undefined));
  find("scatter").addEventListener("click", (event) => {
    const i = nearest(event);
    if (i !== undefined) choose(i, canvas);
  });
  for (const id of ["measure", "shown-run", "scale", "marked"]) find(id).addEventListener("change", update);
  find("search").addEventListener("input", update);
  for (const id of ["across", "up", "picked"]) find(id).addEventListener("change", drawScatter);
  find("site").addEventListener("change", setSite);

  payload.sites.forEach((site, i) => find("site").append(headscan.element("option", site.name, { value: i })));
  find("site-label").hidden = payload.sites.length < 2;
  find("shown-label").hidden = !payload.compared;
  find("map-controls").hidden = false;
  headscan.button(find("rows-shown").parentElement, "More rows", "Show 400 more rows", () => { table.most += 400; drawTable(); });
  const place = (figure) => document.querySelector(`[data-figure="${figure}"]`);
  const files = (figure, name, svg, rows) => headscan.tools(place(figure), name,
    svg && ((file) => headscan.saveSvg(file, svg())), svg && ((file) => headscan.savePng(file, svg())), rows);
  files("map", () => `heads-${view.measure.name}`, () => headscan.mapSvg(view),
    () => headscan.allNumbers(view, Array.from({ length: view.heads.count }, (_, i) => i)));
  files("table", () => `table-${view.measure.name}`, null, () => {
    const { rows, columns } = table.order(view);
    return [["layer", "head", ...columns.slice(1).map((each) => each.label)],
      ...rows.map((i) => [view.heads.layer[i], view.heads.head[i], ...columns.slice(1).map((each) => each.value(i))])];
  });
  const chart = (draw, height) => {
    const svg = headscan.onSvg(760, height, headscan.theme().card);
    draw(svg, 760, height);
    return svg.toString();
  };
  const ofDistribution = () => headscan.distributionRows(view);
  const ofScatter = () => headscan.scatterRows(view.scatter);
  files("distribution", () => `distribution-${view.measure.name}`,
    () => chart((svg, w, h) => headscan.drawDistribution(svg, view, w, h), 220), ofDistribution);
  files("scatter", () => `scatter-${view.scatter.across.name}-${view.scatter.up.name}`,
    () => chart((svg, w, h) => headscan.drawScatter(svg, view.scatter, w, h), 460), ofScatter);
  tables.push(
    headscan.switchable(place("map"), find("drawn-map"), () => headscan.mapRows(view), drawMap),
    headscan.switchable(place("distribution"), find("distribution"), ofDistribution, drawDistribution),
    headscan.switchable(place("scatter"), find("scatter-figure"), ofScatter, drawScatter));
  setSite();
  headscan.onRedraw(() => { drawMap(); drawDistribution(); drawScatter(); });
  document.documentElement.dataset.heads = "ready";
};
headscan.ready = headscan.startHeads();
