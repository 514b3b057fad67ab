"use strict";
// Decoding, number formats, colours and themes that the other scripts share.
const headscan = {};

headscan.bytes = (text) => {
  const raw = atob(text.trim());
  const found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) found[i] = raw.charCodeAt(i);
  return found;
};

headscan.floats = (text) => new Float32Array(headscan.bytes(text).buffer);

headscan.unpacked = async (id) => {
  const packed = new Blob([headscan.bytes(document.getElementById(id).textContent)]);
  return new Response(packed.stream().pipeThrough(new DecompressionStream("gzip"))).text();
};

headscan.number = (value) => {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2);
  return size >= 100 ? value.toFixed(1) : size >= 1 ? value.toFixed(3) : value.toFixed(4);
};

headscan.percent = (value) => (Number.isFinite(value) ? `${(100 * value).toFixed(1)} %` : "–");

headscan.element = (tag, text, attributes = {}) => {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};

const stops = {
  viridis: ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"],
  diverging: ["#123f7a", "#2f6fb5", "#7aaedb", "#c5dcee", "#f4f2ee", "#f6d3a8", "#e79f50", "#c46a12", "#7f3b08"],
};
headscan.classColours = ["#0072b2", "#e69f00", "#d55e00", "#9aa0a6", "#009e73", "#cc79a7"];

const shades = (names) => {
  const parts = names.map((name) => [1, 3, 5].map((i) => parseInt(name.slice(i, i + 2), 16)));
  return Array.from({ length: 256 }, (_, step) => {
    const place = (step / 255) * (parts.length - 1);
    const below = Math.min(Math.floor(place), parts.length - 2);
    const mixed = parts[below].map((part, i) => Math.round(part + (place - below) * (parts[below + 1][i] - part)));
    return `rgb(${mixed.join(",")})`;
  });
};
headscan.ramps = { viridis: shades(stops.viridis), diverging: shades(stops.diverging) };
headscan.ramps.reversed = [...headscan.ramps.diverging].reverse();

headscan.printing = false;

headscan.theme = () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches && !headscan.printing;
  return dark
    ? { dark, ink: "#e8eaee", soft: "#b0b6c0", line: "#343a44", card: "#1c2026", missing: "#2a3038", mark: "#ffffff" }
    : { dark, ink: "#1d2127", soft: "#545b66", line: "#dfe2e7", card: "#ffffff", missing: "#e9ebee", mark: "#000000" };
};

const redraws = [];
headscan.onRedraw = (draw) => redraws.push(draw);
headscan.redraw = () => redraws.forEach((draw) => draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", headscan.redraw);
addEventListener("beforeprint", () => { headscan.printing = true; headscan.redraw(); });
addEventListener("afterprint", () => { headscan.printing = false; headscan.redraw(); });
let pending = 0;
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;  // Phones resize the height while scrolling.
  width = innerWidth;
  clearTimeout(pending);
  pending = setTimeout(headscan.redraw, 150);
});

headscan.quantile = (values, share) => {
  const sorted = Float64Array.from(values).filter(Number.isFinite).sort();  // typed arrays sort without a callback
  if (!sorted.length) return NaN;
  const place = share * (sorted.length - 1);
  const below = Math.floor(place);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below] + (place - below) * (sorted[above] - sorted[below]);
};

headscan.ticks = (low, high, wanted = 5) => {
  const raw = (high - low) / wanted;
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((each) => each * power >= raw);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i += 1) found.push(i * step);
  return found;
};

headscan.shortNumber = (value) => String(Number(value.toPrecision(4)));
