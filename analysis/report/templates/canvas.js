"use strict";
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
