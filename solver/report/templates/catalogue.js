// The catalogue: filters choose cells; matrix, plot and table draw them. All text goes in as text, never as markup.
{
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const [MOST_ROWS, MOST_COLUMNS, MOST_SERIES, SHADES] = [200, 80, 12, 5];
  const figures = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
  const counts = new Intl.NumberFormat("en");
  const SVG = "http://www.w3.org/2000/svg";

  // ---- columns: levels with a code for each cell (-1: missing), or numbers (null: missing)

  const column = (name) => data.columns[name];
  const code = (name, cell) => {
    const { codes } = column(name);
    return Array.isArray(codes) ? codes[cell] : codes;
  };
  const get = (name, cell) => {
    const { levels, numbers, texts } = column(name);
    return (levels ? levels[code(name, cell)] : (numbers ?? texts)[cell]) ?? null;
  };
  const rank = (name, cell) => {
    if (!column(name).levels) return get(name, cell);
    const place = code(name, cell);
    return place < 0 ? null : place;
  };
  const planned = (cell) => data.planned.includes(get("status", cell));
  const formatted = (value, form) => {
    if (value === null) return "";
    if (form === "share") return `${figures.format((100 * value).toFixed(4))} %`;
    if (typeof value === "boolean") return value ? "yes" : "no";
    if (typeof value !== "number") return value;
    return (form === "count" ? counts : figures).format(value);
  };

  const element = (tag, text, attributes = {}) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  const shape = (tag, attributes, text) => {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const chosen = (id) => at(id).selectedOptions[0].textContent;

  // ---- filters

  const selects = [...document.querySelectorAll("#filter-form select")];
  const textsOf = data.searched.map((name) => {
    const { levels, texts } = column(name);
    return { name, levels: levels?.map((level) => String(level).toLowerCase()), texts };
  });
  const search = (words) =>
    words.map((word) => {
      const found = textsOf.map(({ levels }) => levels && new Set(levels.flatMap((text, i) => (text.includes(word) ? [i] : []))));
      return (cell) =>
        textsOf.some(({ name, texts }, i) => (found[i] ? found[i].has(code(name, cell)) : texts[cell].startsWith(word)));
    });

  const matching = () => {
    const told = [];
    const tests = selects.flatMap((select) => {
      if (!select.value) return [];
      told.push(`${select.labels[0].textContent} ${select.selectedOptions[0].textContent}`);
      const allowed = new Set(select.value.split(" ").map(Number));
      return [(cell) => allowed.has(code(select.dataset.column, cell))];
    });
    const most = Number(at("most-devices").value);
    if (most > 0) {
      told.push(`at most ${counts.format(most)} devices used`);
      tests.push((cell) => get("devices_used", cell) !== null && get("devices_used", cell) <= most);
    }
    const words = at("words").value.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length) told.push(`with ${words.join(" ")}`);
    tests.push(...search(words));
    const cells = [];
    for (let cell = 0; cell < data.cells; cell++) if (tests.every((test) => test(cell))) cells.push(cell);
    return { cells, told };
  };

  // ---- groups: cells by two columns, and the best of each

  const grouped = (cells, rows, columns, figure) => {
    const found = new Map();
    const better = figure.sense === "minimise" ? (a, b) => a < b : (a, b) => a > b;
    for (const cell of cells) {
      const [row, across] = [code(rows, cell), code(columns, cell)];
      if (!found.has(row)) found.set(row, new Map());
      const own = found.get(row);
      if (!own.has(across)) own.set(across, { count: 0, first: cell, best: null, value: null });
      const group = own.get(across);
      group.count += 1;
      const value = planned(cell) ? get(figure.name, cell) : null;
      if (value !== null && (group.best === null || better(value, group.value))) [group.best, group.value] = [cell, value];
    }
    return found;
  };
  const level = (name, place) => formatted(place < 0 ? "none" : column(name).levels[place], "count");
  const figureOf = (id) => {
    const [name, title, form, sense] = data.figures[at(id).value];
    return { name, title, form, sense };
  };
  const WORDS = { INFEASIBLE: "no plan", UNKNOWN: "not known", FAILED: "failed" };

  const drawMatrix = (table, cells, rows, columns, figure, caption) => {
    const found = grouped(cells, rows, columns, figure);
    const rowCodes = [...found.keys()].sort((a, b) => a - b);
    const columnCodes = [...new Set(rowCodes.flatMap((row) => [...found.get(row).keys()]))].sort((a, b) => a - b);
    const head = element("tr");
    head.append(element("th", `${rows} \\ ${columns}`.replaceAll("_", " "), { scope: "col" }));
    for (const place of columnCodes.slice(0, MOST_COLUMNS)) head.append(element("th", level(columns, place), { scope: "col" }));
    const body = element("tbody");
    for (const row of rowCodes.slice(0, MOST_ROWS)) {
      const own = found.get(row);
      const values = [...own.values()].flatMap(({ value }) => (value === null ? [] : [value]));
      const ordered = [...new Set(values)].sort((a, b) => (figure.sense === "minimise" ? a - b : b - a));
      const line = element("tr");
      line.append(element("th", level(rows, row), { scope: "row" }));
      for (const place of columnCodes.slice(0, MOST_COLUMNS)) {
        const box = element("td");
        if (own.has(place)) box.append(matrixButton(own.get(place), ordered, box, figure, level(rows, row), level(columns, place)));
        line.append(box);
      }
      body.append(line);
    }
    const thead = element("thead");
    thead.append(head);
    table.replaceChildren(element("caption", caption), thead, body);
    const left = [];
    if (rowCodes.length > MOST_ROWS) left.push(`${rowCodes.length - MOST_ROWS} rows`);
    if (columnCodes.length > MOST_COLUMNS) left.push(`${columnCodes.length - MOST_COLUMNS} columns`);
    return left.length ? ` ${left.join(" and ")} are left out: filter further.` : "";
  };

  const matrixButton = (group, ordered, box, figure, row, across) => {
    const cell = group.best ?? group.first;
    const status = get("status", cell);
    const first = group.value !== null && group.value === ordered[0] && ordered.length > 1;
    const text = group.best === null ? (WORDS[status] ?? "no figure") : formatted(group.value, figure.form);
    const notes = [];
    if (group.best !== null && status !== "OPTIMAL") notes.push(`gap ${formatted(get("gap", cell), "share") || "not known"}`);
    if (group.count > 1) notes.push(group.best === null ? `${group.count} cells` : `of ${group.count}`);
    if (group.best === null) box.className = `no ${status}`;
    else box.className = `q${Math.floor((ordered.indexOf(group.value) * SHADES) / ordered.length)}`;
    const button = element("button", undefined, { type: "button", "data-cell": cell });
    button.append(element("strong", first ? `★ ${text}` : text));
    if (notes.length) button.append(element("small", notes.join(", ")));
    const said = first ? ["best of the row", ...notes] : notes;
    button.setAttribute("aria-label", `${row}, ${across}: ${[text, ...said].join(", ")}`);
    return button;
  };

  // ---- plot: the best of each series at each place across

  const [WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM] = [960, 420, 90, 20, 16, 48];
  const ticksOf = (low, high, log) => {
    const ticks = [];
    if (log) {
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
        for (const step of [1, 2, 5]) ticks.push(step * 10 ** power);
    } else {
      const rough = (high - low) / 5 || high || 1;
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
      for (let tick = Math.ceil(low / step) * step; tick <= high * (1 + 1e-9); tick += step) ticks.push(tick);
    }
    return ticks.filter((tick) => tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9));
  };

  const drawPlot = (cells) => {
    const figure = figureOf("plot-figure");
    const [across, by] = [at("plot-across").value, at("plot-series").value];
    const title = `${figure.title} against ${chosen("plot-across")}, a line for each of the ${chosen("plot-series")}`;
    const found = grouped(cells.filter((cell) => planned(cell) && get(figure.name, cell) !== null && code(across, cell) >= 0), by, across, figure);
    const all = [...found.keys()].sort((a, b) => a - b);
    const lines = all.slice(0, MOST_SERIES).map((place) => ({
      name: level(by, place),
      points: [...found.get(place)]
        .map(([where, group]) => ({ x: column(across).levels[where], y: group.value, cell: group.best }))
        .sort((a, b) => a.x - b.x),
    }));
    const points = lines.flatMap((line) => line.points);
    const drawing = at("plot-drawing");
    drawing.setAttribute("viewBox", `0 0 ${WIDE} ${HIGH}`);
    drawing.replaceChildren(shape("title", { id: "plot-title" }, title));
    at("plot-caption").textContent = title;
    at("plot-legend").replaceChildren();
    const more = all.length > MOST_SERIES ? ` The first ${MOST_SERIES} of ${all.length} ${chosen("plot-series")} are drawn: filter further.` : "";
    if (!points.length) {
      drawing.append(
        shape("desc", { id: "plot-desc" }, "Nothing to draw."),
        shape("text", { x: WIDE / 2, y: HIGH / 2, "text-anchor": "middle" }, "None of the cells has this figure."),
      );
      at("plot-note").textContent = "";
      drawMatrix(at("plot-table"), [], by, across, figure, title);
      return;
    }
    const extent = (name) => [Math.min(...points.map((p) => p[name])), Math.max(...points.map((p) => p[name]))];
    const [[x0, x1], [y0, y1]] = [extent("x"), extent("y")];
    const log = y0 > 0 && y1 / y0 > 8;
    const [low, high] = log ? [y0 / 1.1, y1 * 1.1] : [Math.min(0, y0), y1 * 1.05 || 1];
    const x = (value) => LEFT + 24 + (x1 > x0 ? Math.log(value / x0) / Math.log(x1 / x0) : 0.5) * (WIDE - LEFT - RIGHT - 48);
    const share = (value) => (log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low));
    const y = (value) => HIGH - BOTTOM - share(value) * (HIGH - TOP - BOTTOM);
    const best = points.reduce((a, b) => ((figure.sense === "minimise" ? b.y < a.y : b.y > a.y) ? b : a));
    drawing.append(
      shape("desc", { id: "plot-desc" }, `${lines.length} lines, ${points.length} points; the best is ${formatted(best.y, figure.form)}. The numbers are in the table below.`),
    );
    for (const tick of ticksOf(low, high, log)) {
      drawing.append(
        shape("line", { class: "tick", x1: LEFT, x2: WIDE - RIGHT, y1: y(tick), y2: y(tick) }),
        shape("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, formatted(tick, figure.form)),
      );
    }
    let last = -Infinity;
    for (const tick of [...new Set(points.map((p) => p.x))].sort((a, b) => a - b)) {
      if (x(tick) - last < 44) continue;
      last = x(tick);
      drawing.append(
        shape("line", { class: "tick", x1: last, x2: last, y1: TOP, y2: HIGH - BOTTOM }),
        shape("text", { x: last, y: HIGH - BOTTOM + 16, "text-anchor": "middle" }, counts.format(tick)),
      );
    }
    drawing.append(shape("text", { x: (WIDE + LEFT) / 2, y: HIGH - 8, "text-anchor": "middle" }, `${chosen("plot-across")} (log scale)`));
    lines.forEach((line, index) => {
      const letter = String.fromCharCode(97 + index);
      const path = shape("path", { class: "series", d: line.points.map((p, i) => `${i ? "L" : "M"}${x(p.x).toFixed(1)} ${y(p.y).toFixed(1)}`).join("") });
      path.style.stroke = `var(--c${index})`;
      drawing.append(path);
      for (const point of line.points) {
        const mark = shape("circle", { class: `c${index}`, cx: x(point.x).toFixed(1), cy: y(point.y).toFixed(1), r: 8, "data-cell": point.cell });
        mark.append(shape("title", {}, `${line.name}, ${counts.format(point.x)}: ${formatted(point.y, figure.form)}`));
        drawing.append(mark, shape("text", { class: "in", x: x(point.x).toFixed(1), y: (y(point.y) + 3.5).toFixed(1), "text-anchor": "middle" }, letter));
      }
      const key = element("li");
      const swatch = shape("svg", { viewBox: "0 0 24 16", "aria-hidden": "true" });
      swatch.append(shape("rect", { class: `c${index}`, width: 24, height: 16 }), shape("text", { class: "in", x: 12, y: 12, "text-anchor": "middle" }, letter));
      key.append(swatch, ` ${letter}: ${line.name}`);
      at("plot-legend").append(key);
    });
    at("plot-note").textContent =
      `Each point is the best of its cells. The height has a ${log ? "logarithmic" : "linear"} scale.${more}`;
    const drawn = new Set(all.slice(0, MOST_SERIES));
    drawMatrix(at("plot-table"), cells.filter((cell) => drawn.has(code(by, cell)) && code(across, cell) >= 0), by, across, figure, title);
  };

  // ---- table of cells

  const heads = [...at("cells-table").tHead.rows[0].cells];
  let sorting = null;
  let page = 0;
  const drawCells = (cells) => {
    const ordered = cells.slice();
    if (sorting) {
      const { name, up } = sorting;
      const keys = new Map(cells.map((cell) => [cell, rank(name, cell)]));
      ordered.sort((a, b) => {
        const [one, two] = [keys.get(a), keys.get(b)];
        if (one === null || two === null) return (one === null) - (two === null) || a - b; // what is missing comes last
        return (up ? one - two : two - one) || a - b;
      });
    }
    const size = Number(at("per-page").value);
    const pages = Math.max(Math.ceil(ordered.length / size), 1);
    page = Math.min(Math.max(page, 0), pages - 1);
    const body = at("cells-table").tBodies[0];
    const shown = ordered.slice(page * size, (page + 1) * size);
    body.replaceChildren(
      ...shown.map((cell) => {
        const row = element("tr");
        data.table.forEach(([name, , form], index) => {
          const text = formatted(get(name, cell), form);
          const box = element(index ? "td" : "th", index ? text : undefined, index ? {} : { scope: "row" });
          if (form !== "text") box.className = "number";
          if (name === "status") box.className = `status ${text}`;
          if (!index) box.append(element("button", text, { type: "button", "data-cell": cell }));
          row.append(box);
        });
        return row;
      }),
    );
    for (const head of heads) {
      const own = head.firstElementChild.dataset.column === sorting?.name;
      if (own) head.setAttribute("aria-sort", sorting.up ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    at("previous").disabled = page === 0;
    at("next").disabled = page === pages - 1;
    const first = page * size + 1;
    at("page-of").textContent = shown.length
      ? `rows ${counts.format(first)} to ${counts.format(first + shown.length - 1)} of ${counts.format(ordered.length)}`
      : "no rows";
  };

  // ---- one cell

  const openCell = (cell) => {
    const key = get("cell", cell);
    const status = get("status", cell);
    const value = get("value", cell);
    at("cell-heading").textContent = `${get("model", cell)} on ${get("cluster", cell)}`;
    const said = [`${status}, objective ${get("objective", cell)}`];
    if (value !== null) said.push(`${formatted(value)} ${get("unit", cell)}, gap ${formatted(get("gap", cell), "share")}`);
    for (const [name, before] of [["degrees", ""], ["binds", "what binds: "], ["reason", "why not: "]])
      if (get(name, cell)) said.push(before + get(name, cell));
    at("cell-result").textContent = said.join("; ");
    const usable = data.commands.filter((_, index) => planned(cell) || index === 0 || index === data.commands.length - 1);
    at("cell-commands").textContent = usable.map(([before, after]) => before + key + after).join("\n");
    at("cell-table").tBodies[0].replaceChildren(
      ...Object.keys(data.columns).flatMap((name) => {
        const own = get(name, cell);
        if (own === null || own === "") return [];
        const row = element("tr");
        row.append(element("th", name, { scope: "row" }), element("td", typeof own === "boolean" ? formatted(own) : String(own)), element("td", data.what[name]));
        return [row];
      }),
    );
    at("cell").showModal();
  };

  // ---- what the reader does

  let found = matching();
  const showMatrix = () => {
    const figure = figureOf("matrix-figure");
    const caption = `${figure.title}, ${chosen("matrix-rows")} by ${chosen("matrix-columns")}`;
    const left = drawMatrix(at("matrix-table"), found.cells, at("matrix-rows").value, at("matrix-columns").value, figure, caption);
    const sense = figure.sense === "minimise" ? "least" : "most";
    at("matrix-note").textContent =
      `Of the cells that fall together the best is shown, the ${sense}, with how many they are; the star and the darkest shade are the best of a row. A box opens its cell.${left}`;
  };
  const showCells = () => drawCells(found.cells);
  const showPlot = () => drawPlot(found.cells);
  const filter = () => {
    found = matching();
    page = 0;
    const told = found.told.length ? `: ${found.told.join(", ")}` : "";
    at("count").textContent = `${counts.format(found.cells.length)} of ${counts.format(data.cells)} cells${told}`;
    showMatrix();
    showPlot();
    showCells();
  };

  const form = at("filter-form");
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  at("show-all").addEventListener("click", () => {
    form.reset();
    filter();
  });
  for (const id of ["matrix-figure", "matrix-rows", "matrix-columns"]) at(id).addEventListener("input", showMatrix);
  for (const id of ["plot-figure", "plot-across", "plot-series"]) at(id).addEventListener("input", showPlot);
  at("per-page").addEventListener("input", () => {
    page = 0;
    showCells();
  });
  for (const [id, step] of [["previous", -1], ["next", 1]])
    at(id).addEventListener("click", () => {
      page += step;
      showCells();
    });
  for (const head of heads)
    head.firstElementChild.addEventListener("click", () => {
      const name = head.firstElementChild.dataset.column;
      sorting = { name, up: sorting?.name === name ? !sorting.up : true };
      page = 0;
      showCells();
    });
  document.querySelector("main").addEventListener("click", (event) => {
    const opener = event.target.closest("[data-cell]");
    if (opener) openCell(Number(opener.dataset.cell));
  });
  at("matrix-columns").value = "cluster";
  filter();
}
