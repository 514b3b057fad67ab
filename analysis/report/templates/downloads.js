"use strict";
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

// Buttons under a figure; `svg` and `rows` are functions, so nothing is built before it is asked for.
headscan.tools = (figure, name, svg, rows) => {
  const place = document.querySelector(`[data-figure="${figure}"]`);
  if (svg) {
    headscan.button(place, "SVG", "Save the figure as SVG", () => headscan.saveSvg(name(), svg()));
    headscan.button(place, "PNG", "Save the figure as PNG", () => headscan.savePng(name(), svg()));
  }
  if (rows) headscan.button(place, "CSV", "Save the numbers as CSV", () =>
    headscan.save(`${name()}.csv`, headscan.csv(rows()), "text/csv"));
};

// Every table of the page can be saved too.
document.querySelectorAll(".wide > table").forEach((table, index) => {
  const place = headscan.element("div", null, { class: "tools" });
  headscan.button(place, "CSV", "Save the table as CSV", () => {
    const rows = [...table.rows].map((row) => [...row.cells].map((each) => each.textContent));
    headscan.save(`table-${index + 1}.csv`, headscan.csv(rows), "text/csv");
  });
  table.parentElement.after(place);
});
