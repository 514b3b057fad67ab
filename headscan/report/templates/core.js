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

headscan.percent = (value) => (Number.isFinite(value) ? `${Number((100 * value).toPrecision(3))} %` : "–");

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

// Two ways to draw the same figure: pixels on the page, and an SVG text to save.
const onCanvas = (canvas, width, height) => {
  const ratio = Math.max(devicePixelRatio || 1, headscan.printing ? 2 : 1);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return {
    rect: (x, y, w, h, fill, opacity = 1) => {
      context.globalAlpha = opacity;
      context.fillStyle = fill;
      context.fillRect(x, y, w, h);
    },
    frame: (x, y, w, h, stroke, thick = 1) => {
      context.globalAlpha = 1;
      context.strokeStyle = stroke;
      context.lineWidth = thick;
      context.strokeRect(x, y, w, h);
    },
    dot: (x, y, radius, fill, opacity = 1) => {
      context.globalAlpha = opacity;
      context.fillStyle = fill;
      context.beginPath();
      context.arc(x, y, radius, 0, 7);
      context.fill();
    },
    line: (x1, y1, x2, y2, stroke, dash = []) => {
      context.globalAlpha = 1;
      context.strokeStyle = stroke;
      context.lineWidth = 1;
      context.setLineDash(dash);
      context.beginPath();
      context.moveTo(x1, y1);
      context.lineTo(x2, y2);
      context.stroke();
      context.setLineDash([]);
    },
    text: (x, y, text, fill, align = "left", size = 11, turn = 0) => {
      context.globalAlpha = 1;
      context.fillStyle = fill;
      context.font = `${size}px system-ui, 'Liberation Sans', sans-serif`;
      context.textAlign = align;
      context.textBaseline = "middle";
      context.save();
      context.translate(x, y);
      context.rotate(turn);
      context.fillText(text, 0, 0);
      context.restore();
    },
  };
};

const escaped = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

const onSvg = (width, height, background) => {
  const parts = [];
  const round = (value) => Number(value.toFixed(2));
  const anchors = { left: "start", center: "middle", right: "end" };
  if (background) parts.push(`<rect width="${width}" height="${height}" fill="${background}"/>`);
  return {
    rect: (x, y, w, h, fill, opacity = 1) => parts.push(
      `<rect x="${round(x)}" y="${round(y)}" width="${round(w)}" height="${round(h)}" fill="${fill}"`
      + `${opacity < 1 ? ` opacity="${opacity}"` : ""}/>`),
    frame: (x, y, w, h, stroke, thick = 1) => parts.push(
      `<rect x="${round(x)}" y="${round(y)}" width="${round(w)}" height="${round(h)}" fill="none" stroke="${stroke}"`
      + ` stroke-width="${thick}"/>`),
    dot: (x, y, radius, fill, opacity = 1) => parts.push(
      `<circle cx="${round(x)}" cy="${round(y)}" r="${radius}" fill="${fill}" opacity="${opacity}"/>`),
    line: (x1, y1, x2, y2, stroke, dash = []) => parts.push(
      `<line x1="${round(x1)}" y1="${round(y1)}" x2="${round(x2)}" y2="${round(y2)}" stroke="${stroke}"`
      + ` stroke-dasharray="${dash.join(" ")}"/>`),
    text: (x, y, text, fill, align = "left", size = 11, turn = 0) => parts.push(
      `<text x="${round(x)}" y="${round(y)}" fill="${fill}" font-size="${size}" text-anchor="${anchors[align]}"`
      + ` dominant-baseline="central" transform="rotate(${round((turn * 180) / Math.PI)} ${round(x)} ${round(y)})">`
      + `${escaped(text)}</text>`),
    toString: () => `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}"`
      + ` viewBox="0 0 ${width} ${height}" font-family="system-ui, 'Liberation Sans', sans-serif">${parts.join("")}</svg>`,
  };
};
headscan.onCanvas = onCanvas;
headscan.onSvg = onSvg;

// Files to save: figures as SVG and PNG, numbers as CSV.
headscan.save = (name, content, type) => {
  const link = headscan.element("a", null, { download: name });
  link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  headscan.lastSaved = { name, content };
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};

// A spreadsheet would run a text that begins like a formula.
const cell = (value) => {
  if (value === null || value === undefined || (typeof value === "number" && !Number.isFinite(value))) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) && !/^[+-]?[\d.]+$/.test(value) ? `'${value}` : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};
headscan.csv = (rows) => `${rows.map((row) => row.map(cell).join(",")).join("\r\n")}\r\n`;

headscan.saveSvg = (name, svg) => headscan.save(`${name}.svg`, svg, "image/svg+xml");

headscan.savePng = (name, svg, scale = 2) => {
  const picture = new Image();
  picture.onload = () => {
    const canvas = headscan.element("canvas");
    canvas.width = picture.width * scale;
    canvas.height = picture.height * scale;
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => headscan.save(`${name}.png`, blob, "image/png"));
  };
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
};

headscan.button = (place, label, title, act) => {
  const made = headscan.element("button", label, { type: "button", title });
  made.addEventListener("click", act);
  place.append(made);
  return made;
};

// A table of rows, the first of which is the heading; more than `most` rows appear on request.
headscan.numberTable = (rows, label, most = 200) => {
  const [heading, ...body] = rows;
  const numeric = heading.map((_, i) => body.some((row) => typeof row[i] === "number"));
  const whole = heading.map((_, i) => body.every((row) => typeof row[i] !== "number" || Number.isInteger(row[i])));
  const line = (tag, row) => {
    const made = headscan.element("tr");
    heading.forEach((_, i) => {
      const value = row[i];
      const text = typeof value === "number" && !whole[i] ? headscan.number(value) : value ?? "–";
      made.append(headscan.element(tag, text, { ...(numeric[i] ? { class: "n" } : {}), ...(tag === "th" ? { scope: "col" } : {}) }));
    });
    return made;
  };
  const [table, head, lines] = ["table", "thead", "tbody"].map((tag) => headscan.element(tag));
  head.append(line("th", heading));
  table.append(head, lines);
  const room = headscan.element("div", null, { class: "wide numbers", role: "region", tabindex: "0", "aria-label": label });
  room.append(table);
  const add = (count) => {
    const first = lines.rows.length;
    lines.append(...body.slice(first, first + count).map((row) => line("td", row)));
    return body.length - lines.rows.length;
  };
  if (add(most) > 0) {
    const more = headscan.button(room, "", "", () => (add(1000) > 0 ? count() : more.remove()));
    const count = () => {
      more.textContent = `Show more of ${body.length.toLocaleString()} rows (${lines.rows.length.toLocaleString()} shown)`;
    };
    count();
  }
  return room;
};

// Every figure can be switched to a table of its numbers. Returns a function that fills an open table again.
headscan.switchable = (place, figure, rows, redraw) => {
  let shown = null;
  const fill = () => {
    const made = headscan.numberTable(rows(), "Numbers of the figure");
    if (shown) shown.replaceWith(made);
    else figure.after(made);
    shown = made;
  };
  const button = headscan.button(place, "Table", "Show the numbers in place of the figure", () => {
    figure.hidden = !figure.hidden;
    button.setAttribute("aria-pressed", figure.hidden);
    if (figure.hidden) return fill();
    shown.remove();
    shown = null;
    return redraw();
  });
  button.setAttribute("aria-pressed", "false");
  return () => { if (shown) fill(); };
};

// Buttons under a figure; `svg` and `rows` are functions, so nothing is built before it is asked for.
headscan.tools = (place, name, svg, png, rows) => {
  if (svg) {
    headscan.button(place, "SVG", "Save the figure as SVG", () => svg(name()));
    headscan.button(place, "PNG", "Save the figure as PNG", () => png(name()));
  }
  headscan.button(place, "CSV", "Save the numbers as CSV", () =>
    headscan.save(`${name()}.csv`, headscan.csv(rows()), "text/csv"));
};

// Commands can be copied. Pages from a server without TLS have no clipboard; there the command is selected.
document.querySelectorAll("pre.command").forEach((command) => {
  const place = headscan.element("div", null, { class: "tools command-line" });
  command.replaceWith(place);
  place.append(command);
  const button = headscan.button(place, "Copy", "Copy the command", async () => {
    getSelection().selectAllChildren(command);
    if (navigator.clipboard) await navigator.clipboard.writeText(command.textContent.trim());
    button.textContent = navigator.clipboard ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
});

// Every table of the page can be saved too.
document.querySelectorAll(".wide > table").forEach((table, index) => {
  const place = headscan.element("div", null, { class: "tools" });
  headscan.button(place, "CSV", "Save the table as CSV", () => {
    const rows = [...table.rows].map((row) => [...row.cells].map((each) => each.textContent));
    headscan.save(`table-${index + 1}.csv`, headscan.csv(rows), "text/csv");
  });
  table.parentElement.after(place);
});
