// What a page has of figures, tables and live parts is set going here.
import { Figure } from "./figure.js";
import { Live } from "./live.js";
import { Table } from "./table.js";

const section = document.getElementById("figure");
const figure = section ? new Figure(section) : null;
figure?.refresh();

const tables = [...document.querySelectorAll("table[data-sortable]")].map((table) => new Table(table, document.getElementById("filter")));
const head = document.querySelector("[data-events]");
const polled = document.querySelector("[data-poll]");

new Live({
  events: head?.dataset.events ?? "",
  poll: Number(polled?.dataset.poll ?? 0),
  renewed: (fresh) => {
    for (const table of tables) table.arrange();
    if (section && fresh.getElementById("figure")?.dataset.live === undefined) delete section.dataset.live;
  },
  grown: () => figure?.grown(),
});
