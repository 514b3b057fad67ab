"use strict";
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
    const width = find("distribution").clientWidth;
    const drawn = view.measure.scale !== "classes";
    const svg = headscan.onSvg(width, 220);
    if (drawn) headscan.drawDistribution(svg, view, width, 220);
    find("distribution").innerHTML = drawn ? svg.toString() : "";
    find("distribution-note").textContent = headscan.distributionNote(view);
  };
  const drawScatter = () => {
    const width = find("scatter-figure").clientWidth;
    const height = Math.min(440, Math.max(300, 0.6 * width));
    const scatter = { heads: view.heads, across: view.heads.byName.get(find("across").value), up: view.heads.byName.get(find("up").value) };
    if (!scatter.across || !scatter.up) return;
    const share = Number(find("picked").value);
    scatter.sets = { x: view.heads.picks(scatter.across, share), y: view.heads.picks(scatter.up, share) };
    view.scatter = scatter;
    dots = headscan.drawScatter(headscan.onCanvas(find("scatter"), width, height), scatter, width, height);
    headscan.picksNote(find("picks"), scatter);
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
    if (event.key === "Enter" && view.cursor !== null) choose(view.cursor, canvas);
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
  headscan.tools("map", () => `heads-${view.measure.name}`, () => headscan.mapSvg(view), 
    () => headscan.allNumbers(view, Array.from({ length: view.heads.count }, (_, i) => i)));
  headscan.tools("table", () => `table-${view.measure.name}`, null, () => {
    const { rows, columns } = table.order(view);
    return [["layer", "head", ...columns.slice(1).map((each) => each.label)],
      ...rows.map((i) => [view.heads.layer[i], view.heads.head[i], ...columns.slice(1).map((each) => each.value(i))])];
  });
  const chart = (draw, height) => {
    const svg = headscan.onSvg(760, height, headscan.theme().card);
    draw(svg, 760, height);
    return svg.toString();
  };
  headscan.tools("distribution", () => `distribution-${view.measure.name}`,
    () => chart((svg, w, h) => headscan.drawDistribution(svg, view, w, h), 220), () => headscan.distributionRows(view));
  headscan.tools("scatter", () => `scatter-${view.scatter.across.name}-${view.scatter.up.name}`,
    () => chart((svg, w, h) => headscan.drawScatter(svg, view.scatter, w, h), 460), () => headscan.scatterRows(view.scatter));
  setSite();
  headscan.onRedraw(() => { drawMap(); drawDistribution(); drawScatter(); });
  document.documentElement.dataset.heads = "ready";
};
headscan.ready = headscan.startHeads();
