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
