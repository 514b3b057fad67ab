"use strict";
// The table next to the map: sorted, searched, a page of rows at a time.
headscan.HeadTable = class {
  constructor(table, choose) {
    Object.assign(this, { table, choose, most: 100, sorted: { column: "value", rising: null } });
  }

  columns(view) {
    const { heads, measure } = view;
    const own = view.of === "own";
    const found = [
      { key: "head", label: "head", value: (i) => 1000 * heads.layer[i] + heads.head[i], text: (i) => heads.name(i) },
      { key: "kv", label: "KV", value: (i) => heads.kv[i], text: (i) => heads.kv[i] },
      { key: "value", label: view.of === "difference" ? "difference" : "value", value: (i) => view.values[i],
        text: (i) => heads.shown(measure, view.values[i]) },
    ];
    const std = own ? heads.column(measure, "std") : null;
    if (std) found.push({ key: "std", label: "± std", value: (i) => std[i], text: (i) => headscan.number(std[i]) });
    const inactive = own ? heads.column(measure, "inactive") : null;
    if (inactive) {
      found.push({ key: "inactive", label: "inactive", value: (i) => inactive[i], text: (i) => headscan.percent(inactive[i]) });
    }
    return found;
  }

  order(view) {
    const columns = this.columns(view);
    const by = columns.find((each) => each.key === this.sorted.column) ?? columns[2];
    const rising = this.sorted.rising ?? (by.key === "value" ? view.measure.direction === "low" : by.key !== "inactive");
    const rows = Array.from({ length: view.heads.count }, (_, i) => i).filter((i) => !view.matched || view.matched.has(i));
    const keys = rows.length ? Float64Array.from({ length: view.heads.count }, (_, i) => by.value(i)) : [];
    const sign = rising ? 1 : -1;
    rows.sort((a, b) => {
      if (Number.isNaN(keys[a]) || Number.isNaN(keys[b])) return Number.isNaN(keys[a]) - Number.isNaN(keys[b]);
      return sign * (keys[a] - keys[b]) || a - b;
    });
    return { rows, columns, by, rising };
  }

  draw(view) {
    this.view = view;
    const { rows, columns, by, rising } = this.order(view);
    const line = headscan.element("tr");
    for (const column of columns) {
      const heading = headscan.element("th", null, { scope: "col" });
      if (column === by) heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
      const button = headscan.element("button", `${column.label}${column === by ? (rising ? " ▲" : " ▼") : ""}`,
        { type: "button", title: `Sort by ${column.label}` });
      button.addEventListener("click", () => {
        this.sorted = { column: column.key, rising: column === by ? !rising : null };
        this.draw(this.view);
      });
      heading.append(button);
      line.append(heading);
    }
    this.table.tHead.replaceChildren(line);
    const body = document.createDocumentFragment();
    for (const i of rows.slice(0, this.most)) body.append(this.row(i, columns, view));
    this.table.tBodies[0].replaceChildren(body);
    this.rows = rows;
  }

  row(i, columns, view) {
    const row = headscan.element("tr");
    if (i === view.cursor) row.className = "chosen";
    columns.forEach((column, place) => {
      const cell = headscan.element("td");
      if (place === 0) {
        const button = headscan.element("button", column.text(i), { type: "button", title: view.heads.title(i) });
        cell.append(button);
      } else {
        cell.textContent = column.text(i);
      }
      row.append(cell);
    });
    row.addEventListener("click", () => this.choose(i));
    return row;
  }
};

// All measures of the rows in order, for a file.
headscan.allNumbers = (view, rows) => {
  const { heads } = view;
  const columns = heads.measures.map((each) => [each, heads.column(each, "values")]);
  return [
    ["layer", "head", "kv_head", ...heads.measures.map((each) => each.name)],
    ...rows.map((i) => [heads.layer[i], heads.head[i], heads.kv[i],
      ...columns.map(([each, values]) => (each.scale === "classes" ? each.classes[values[i]] ?? "" : values[i]))]),
  ];
};
