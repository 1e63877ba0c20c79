"use strict";
// Column headers become buttons only where this script runs. Numbers sort by their exact value, texts by letters.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  if (body.rows.length < 2) continue;
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      const rows = [...body.rows];
      const compare = (a, b) => {
        const [one, two] = [a.cells[column], b.cells[column]];
        const numeric = one.dataset.value !== undefined && two.dataset.value !== undefined;
        return numeric ? one.dataset.value - two.dataset.value : one.textContent.localeCompare(two.textContent);
      };
      rows.sort((a, b) => (up ? compare(a, b) : compare(b, a)));
      body.append(...rows);
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
    });
  });
}
