"use strict";
// Figures by plotly: its code runs after the first paint, and each figure follows theme and width.
(() => {
  const figures = [...document.querySelectorAll(".plot")];
  if (!figures.length) return;
  const specs = new Map(figures.map((place) => [place, JSON.parse(place.querySelector("script").textContent)]));
  const light = { "#222222": "#e8eaee", "#8a8a8a": "#9aa1ad", "#c9ced6": "#596170", "#9a9a9a": "#9aa1ad", "#1f5fa8": "#7db3f0",
    "#7b3fa0": "#c08ae0", "#1d7a4c": "#5cc58f", "#2a8f57": "#5cc58f", "#a83232": "#e88a8a", "#6b4f3a": "#c2a184", "#eceef1": "#2a3038" };

  const recoloured = (part) => {
    if (typeof part === "string") return light[part.toLowerCase()] ?? part;
    if (Array.isArray(part)) return part.map(recoloured);
    if (part && typeof part === "object") return Object.fromEntries(Object.entries(part).map(([name, each]) => [name, recoloured(each)]));
    return part;
  };

  const layoutFor = (place, spec) => {
    const theme = headscan.theme();
    const layout = structuredClone(spec.layout);
    const panels = Object.keys(layout).filter((name) => /^xaxis\d*$/.test(name)).length;
    const room = place.clientWidth;
    const narrow = room < 640;
    const natural = layout.width ?? 900;
    // Panels next to each other, and long names of rows, need room; a narrow page scrolls them.
    const named = Object.entries(layout).some(([name, axis]) => /^yaxis\d*$/.test(name) && axis.automargin);
    const least = Math.min(natural, panels > 1 ? 300 * Math.min(panels, 3) : named ? 620 : 0);
    layout.width = Math.max(Math.min(natural, room), least);
    if (narrow && layout.showlegend !== false) {
      const rows = Math.max(1, spec.data.filter((trace) => trace.showlegend !== false && trace.name).length);
      layout.legend = { orientation: "h", x: 0, xanchor: "left", y: 0, yanchor: "bottom", yref: "container" };
      layout.margin = { ...layout.margin, r: 24, b: 60 + 20 * rows };
      layout.height = (layout.height ?? 400) + 20 * rows;
    }
    Object.assign(layout, { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" });
    layout.font = { ...layout.font, color: theme.ink };
    layout.modebar = { ...layout.modebar, bgcolor: theme.card, color: theme.soft, activecolor: theme.ink };
    layout.hoverlabel = { ...layout.hoverlabel, bgcolor: theme.ink, bordercolor: theme.line, font: { color: theme.card } };
    for (const name of Object.keys(layout).filter((each) => /^[xy]axis\d*$/.test(each))) {
      Object.assign(layout[name], { gridcolor: theme.line, linecolor: theme.line, zerolinecolor: theme.line });
    }
    return layout;
  };

  const draw = (place) => {
    if (place.parentElement.hidden) return;
    const spec = specs.get(place);
    const themed = headscan.theme().dark ? recoloured(spec) : spec;
    const layout = layoutFor(place, { ...themed, layout: themed.layout });
    const target = place.querySelector(".drawn");
    Plotly.react(target, structuredClone(themed.data), layout,
      { displaylogo: false, showSendToCloud: false, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d", "toImage"] });
    place.style.setProperty("--print-zoom", Math.min(1, 690 / layout.width));
    place.style.minHeight = "0";
  };

  const numbers = (column) => {
    if (!column || !column.bdata) return column;
    const kinds = { f8: Float64Array, f4: Float32Array, i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array, u4: Uint32Array };
    const flat = Array.from(new kinds[column.dtype](headscan.bytes(column.bdata).buffer));
    if (!column.shape) return flat;
    const wide = Number(String(column.shape).split(",").pop());
    return Array.from({ length: flat.length / wide }, (_, row) => flat.slice(row * wide, (row + 1) * wide));
  };
  const plain = (text) => {
    if (typeof text !== "string") return text ?? "";
    return new DOMParser().parseFromString(text.replaceAll("<br>", "; "), "text/html").documentElement.textContent;
  };

  const axisOf = (spec, trace, name) => spec.layout[(trace[`${name}axis`] ?? name).replace(name, `${name}axis`)] ?? {};

  // Rows that only place an arm have its name as the label of a tick.
  const labelled = (axis) => {
    const [places, labels] = [numbers(axis.tickvals), axis.ticktext];
    return (value) => (labels && typeof value === "number" ? plain(labels[places.indexOf(value)] ?? "") : plain(value));
  };

  // Generic rows of a figure: series, panel, both coordinates, the ends of the interval, and the hover text. Traces that
  // draw other numbers, such as points at the edge of a frame, have theirs in `customdata`: x, y, low and high.
  const rows = (spec) => {
    const found = [["series", "panel", "x", "y", "low", "high", "value", "text"]];
    for (const trace of spec.data) {
      const own = numbers(trace.customdata);
      const z = trace.z && (own ?? numbers(trace.z));
      const [xs, ys] = !z && own ? [0, 1].map((part) => own.map((each) => each[part])) : [numbers(trace.x), numbers(trace.y)];
      const [across, up] = [axisOf(spec, trace, "x"), axisOf(spec, trace, "y")];
      const panel = up.title?.text ?? "";
      if (z) {
        z.forEach((line, row) => line.forEach((value, column) => found.push(
          ["", plain(panel), plain(xs[column]), plain(ys[row]), null, null, value, plain(trace.hovertext?.[row]?.[column])])));
      } else if (trace.fill !== "toself") {
        const error = trace.error_y ?? trace.error_x ?? {};
        const [middle, above] = [trace.error_x ? xs : ys, numbers(error.array)];
        const below = numbers(error.arrayminus) ?? above;
        const [nameX, nameY] = [labelled(across), labelled(up)];
        (xs ?? []).forEach((x, i) => {
          if (x === null) return;
          const [low, high] = above ? [middle[i] - below[i], middle[i] + above[i]] : own ? [own[i][2], own[i][3]] : [null, null];
          found.push([plain(trace.name), plain(panel), nameX(x), nameY(ys[i]), low, high, null, plain(trace.hovertext?.[i])]);
        });
      }
    }
    return found;
  };

  // The rows as a reader wants them: a heat map in its shape; of other figures only columns with numbers, named like the axes.
  const tableRows = (spec) => {
    const drawn = spec.data.filter((trace) => trace.z || (numbers(trace.x) ?? []).some((x) => x !== null));
    const ys = numbers(drawn[0]?.y) ?? [];
    if (drawn.some((trace) => trace.z) && drawn.every((trace) => String(numbers(trace.y)) === String(ys))) {
      // Bars next to a heat map share its rows, so they are a column more.
      const columns = drawn.flatMap((trace) => {
        const [xs, z] = [numbers(trace.x), trace.z && (numbers(trace.customdata) ?? numbers(trace.z))];
        if (!z) return [[plain(axisOf(spec, trace, "x").title?.text ?? ""), xs]];
        return xs.map((x, column) => [plain(x), z.map((line) => (Number.isFinite(line[column]) ? line[column] : null))]);
      });
      return [[plain(axisOf(spec, drawn[0], "y").title?.text ?? ""), ...columns.map(([name]) => name)],
        ...ys.map((y, row) => [plain(y).trim(), ...columns.map(([, values]) => values[row])])];
    }
    const titles = (name) => [...new Set(drawn.map((trace) => plain(axisOf(spec, trace, name).title?.text ?? "")))];
    const [across, up] = [titles("x"), titles("y")];
    const [heading, ...body] = rows(spec);
    const used = heading.map((name, i) => body.some((row) => row[i] !== null && row[i] !== "") && !(name === "panel" && up.length === 1));
    const named = heading.map((name) => (name === "x" && across.length === 1 && across[0] ? across[0]
      : name === "y" && up.length === 1 && up[0] ? up[0] : name));
    return [named, ...body].map((row) => row.filter((_, i) => used[i]));
  };

  const picture = async (place, name, format) => {
    const target = place.querySelector(".drawn");
    const { width, height } = target.layout;
    const url = await Plotly.toImage(target, { format, width, height, scale: format === "png" ? 2 : 1 });
    const [, kind, content] = /^data:([^;,]+)(?:;[^,]*)?,([\s\S]*)$/.exec(url);
    headscan.save(`${name}.${format}`, format === "svg" ? decodeURIComponent(content) : new Blob([headscan.bytes(content)], { type: kind }), kind);
  };

  for (const place of figures) {
    const tools = headscan.element("div", null, { class: "tools" });
    const room = place.parentElement;
    room.after(tools);
    headscan.tools(tools, () => place.id, (name) => picture(place, name, "svg"), (name) => picture(place, name, "png"),
      () => rows(specs.get(place)));
    headscan.switchable(tools, room, () => tableRows(specs.get(place)), () => draw(place));
  }

  const pause = () => new Promise((done) => setTimeout(done, 0));
  const start = async () => {
    await headscan.ready;
    const source = document.getElementById("plotly-source");
    const script = headscan.element("script", await headscan.unpacked("plotly-source"));
    source.remove();
    document.head.append(script);
    for (const place of figures) {
      draw(place);
      await pause();
    }
    headscan.onRedraw(() => figures.forEach(draw));
    document.documentElement.dataset.plots = "ready";
  };
  headscan.plotted = new Promise((done) => requestAnimationFrame(() => setTimeout(() => start().then(done), 0)));
})();
