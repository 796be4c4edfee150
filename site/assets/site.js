// Sorts a table by the column whose title is clicked: by the first number of each cell where all cells have one, else by text.
"use strict";
(function () {
  function key(cell) {
    const text = cell.textContent.trim();
    const number = text.match(/^-?\d[\d,]*(\.\d+)?(e-?\d+)?/i);
    return { text, number: number ? parseFloat(number[0].replace(/,/g, "")) : null };
  }
  function sort(table, column, down) {
    const body = table.tBodies[0];
    const rows = Array.from(body.rows).map((row) => ({ row, key: key(row.cells[column] || row) }));
    const filled = rows.filter((one) => one.key.text !== "");
    const numbers = filled.length > 0 && filled.every((one) => one.key.number !== null);
    rows.sort((a, b) => {
      if ((a.key.text === "") !== (b.key.text === "")) return a.key.text === "" ? 1 : -1;
      const order = numbers ? a.key.number - b.key.number : a.key.text.localeCompare(b.key.text);
      return down ? -order : order;
    });
    rows.forEach((one) => body.appendChild(one.row));
  }
  for (const table of document.querySelectorAll("table")) {
    if (!table.tHead || !table.tBodies[0] || table.tBodies[0].rows.length < 4) continue;
    Array.from(table.tHead.rows[0].cells).forEach((cell, column) => {
      let down = true;
      cell.classList.add("sorts");
      cell.tabIndex = 0;
      const turn = () => { down = !down; sort(table, column, down); };
      cell.addEventListener("click", turn);
      cell.addEventListener("keydown", (event) => { if (event.key === "Enter") turn(); });
    });
  }
})();
