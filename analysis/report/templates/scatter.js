"use strict";
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
