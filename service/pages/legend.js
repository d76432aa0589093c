// The legend: a button for each line, since plotly's own can't be reached by keyboard.
import { colorAt, SYMBOLS } from "./draw.js";

const PATHS = {
  circle: "M0-4a4 4 0 1 0 .01 0z", square: "M-3.5-3.5h7v7h-7z", diamond: "M0-5l4 5-4 5-4-5z", "triangle-up": "M0-4.5l4.5 8h-9z",
  "triangle-down": "M0 4.5l4.5-8h-9z", "triangle-left": "M-4.5 0l8-4.5v9z", "triangle-right": "M4.5 0l-8-4.5v9z",
  cross: "M-1.5-4h3v2.5h2.5v3h-2.5v2.5h-3v-2.5h-2.5v-3h2.5z", x: "M-4-2.5l1.5-1.5 2.5 2.5 2.5-2.5 1.5 1.5-2.5 2.5 2.5 2.5-1.5 1.5-2.5-2.5-2.5 2.5-1.5-1.5 2.5-2.5z",
  pentagon: "M0-4.5l4.3 3.1-1.6 5.1h-5.4l-1.6-5.1z", hexagon: "M-4 0l2-3.5h4l2 3.5-2 3.5h-4z",
};

function sample(color, symbol) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  for (const [name, value] of Object.entries({ width: 28, height: 12, viewBox: "-14 -6 28 12", "aria-hidden": "true" })) svg.setAttribute(name, value);
  const line = document.createElementNS(space, "path");
  line.setAttribute("d", "M-14 0h28");
  line.setAttribute("stroke", color);
  line.setAttribute("stroke-width", "1.6");
  const mark = document.createElementNS(space, "path");
  mark.setAttribute("d", PATHS[symbol]);
  mark.setAttribute("fill", color);
  svg.append(line, mark);
  return svg;
}

export class Legend {
  // `hide` is called with the keys that are hidden now.
  constructor(list, cycles, hide) {
    Object.assign(this, { list, cycles, hide, hidden: new Set(), keys: [] });
  }

  show(curves, hidden) {
    this.hidden = new Set(hidden);
    const entries = [...new Map(curves.map((curve) => [curve.key, curve])).values()];
    const byIndex = new Map(); // seeds of an arm that are drawn each by itself share an entry
    for (const curve of entries) if (!byIndex.has(curve.key)) byIndex.set(curve.key, curve);
    this.keys = [...byIndex.keys()];
    const focused = document.activeElement?.closest(".legend") === this.list ? document.activeElement.dataset.key : null;
    const items = [...byIndex.values()].map((curve) => this.entry(curve));
    if (items.length > 1) items.push(this.all());
    this.list.replaceChildren(...items);
    if (focused) this.list.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  entry(curve) {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.key = curve.key;
    button.setAttribute("aria-pressed", String(!this.hidden.has(curve.key)));
    button.title = "Hide or show; double-click: only this one";
    button.append(sample(colorAt(this.cycles, curve.index), SYMBOLS[curve.index % SYMBOLS.length]), curve.label);
    button.addEventListener("click", (event) => (event.detail === 2 ? this.only(curve.key) : this.toggle(curve.key)));
    return item(button);
  }

  all() {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.key = "all";
    button.textContent = "Show all";
    button.hidden = !this.hidden.size;
    button.addEventListener("click", () => this.change(new Set()));
    return item(button);
  }

  toggle(key) {
    const hidden = new Set(this.hidden);
    if (!hidden.delete(key)) hidden.add(key);
    this.change(hidden);
  }

  only(key) {
    this.change(new Set(this.keys.filter((one) => one !== key)));
  }

  change(hidden) {
    this.hidden = hidden;
    for (const button of this.list.querySelectorAll("button")) {
      if (button.dataset.key === "all") button.hidden = !hidden.size;
      else button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.key)));
    }
    this.hide(hidden);
  }
}

function item(child) {
  const found = document.createElement("li");
  found.append(child);
  return found;
}
