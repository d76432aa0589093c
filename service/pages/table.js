// A table that sorts by a click on its head and shows only the rows that a box asks for.

const valueOf = (row, place) => {
  const cell = row.cells[place];
  const text = cell.dataset.value ?? cell.textContent.trim();
  const number = Number(text);
  return text === "" ? null : Number.isNaN(number) ? text : number;
};

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

export class Table {
  constructor(table, filter) {
    Object.assign(this, { table, filter, place: null, down: false });
    table.tHead.addEventListener("click", (event) => {
      const head = event.target.closest("th");
      if (!head || !event.target.closest("a") || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      this.sortBy(head.cellIndex);
    });
    filter?.addEventListener("input", () => this.filterRows());
  }

  sortBy(place) {
    this.down = this.place === place && !this.down;
    this.place = place;
    for (const head of this.table.tHead.rows[0].cells) head.removeAttribute("aria-sort");
    this.table.tHead.rows[0].cells[place].setAttribute("aria-sort", this.down ? "descending" : "ascending");
    this.arrange();
  }

  // Also after the rows have been renewed. Rows without a value come last in either order.
  arrange() {
    const body = this.table.tBodies[0];
    if (this.place !== null) {
      const keyed = [...body.rows].map((row) => [valueOf(row, this.place), row]);
      const [present, absent] = [keyed.filter(([value]) => value !== null), keyed.filter(([value]) => value === null)];
      present.sort(([a], [b]) => (this.down ? compare(b, a) : compare(a, b)));
      const rows = [...present, ...absent].map(([, row]) => row);
      if (rows.some((row, i) => body.rows[i] !== row)) body.append(...rows);
    }
    this.filterRows();
  }

  filterRows() {
    const words = (this.filter?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of this.table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  }
}
