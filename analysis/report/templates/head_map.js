"use strict";
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
