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
