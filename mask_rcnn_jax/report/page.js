// A click sorts by the column, a second click reverses; cells without a value stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const value = (row, column) => {
    const cell = row.cells[column];
    return "v" in cell.dataset ? parseFloat(cell.dataset.v) : cell.textContent;
  };
  for (const button of table.tHead.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th"), body = table.tBodies[0];
      const text = head.cellIndex === 0;
      const up = head.ariaSort ? head.ariaSort === "descending" : text;
      for (const other of table.tHead.querySelectorAll("th")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const compare = (a, b) => {
        const x = value(a, head.cellIndex), y = value(b, head.cellIndex);
        if (text) return up ? x.localeCompare(y) : y.localeCompare(x);
        if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y);
        return up ? x - y : y - x;
      };
      body.append(...[...body.rows].sort(compare));
    });
  }
}
