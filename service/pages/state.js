// The state of a chart: its controls, its part of the URL, and the questions that it asks the API.

const PICTURE = ["trials", "where", "group_by", "band", "smooth", "yscale", "x", "from", "to", "clipped", "ymin", "ymax"];
const CURVES = ["trials", "where", "group_by", "band", "smooth", "from", "to"];

const defaultOf = (control) => control.dataset.default ?? "";

export class State {
  constructor(section) {
    this.form = section.querySelector("form");
    this.base = section.dataset.base;
    this.fixed = JSON.parse(section.dataset.fixed);
    this.form.addEventListener("submit", (event) => event.preventDefault());
  }

  // Calls back when a control has another value; a number that is being typed is waited for.
  onChange(callback) {
    this.form.addEventListener("change", () => callback());
  }

  control(name) {
    return this.form.elements.namedItem(name);
  }

  get(name) {
    const control = this.control(name);
    if (!control) return "";
    if (control.type === "checkbox") return control.checked ? control.value : "";
    return control.value;
  }

  set(name, value) {
    const control = this.control(name);
    if (control) control.value = value ?? "";
  }

  // The option of the chosen metric carries what is known of it.
  get metric() {
    const option = this.control("metric").selectedOptions[0];
    const { plot, ylabel, yscale, zero, picture } = option.dataset;
    return { name: option.value, plot, ylabel, yscale, fromZero: zero !== undefined, onlyPicture: picture !== undefined };
  }

  get hidden() {
    return new Set(this.get("hide").split("~").filter(Boolean));
  }

  set hidden(keys) {
    this.set("hide", [...keys].join("~"));
  }

  // Every control that doesn't have its default, by the names of the API.
  query(names) {
    const found = new URLSearchParams();
    for (const control of this.form.elements) {
      if (!control.name || control.name in this.fixed || (names && !names.includes(control.name))) continue;
      if (["checkbox", "radio"].includes(control.type) && !control.checked) continue;
      if (control.value.trim() !== defaultOf(control)) found.append(control.name, control.value.trim());
    }
    return found;
  }

  address(path, query, extra = {}) {
    const all = new URLSearchParams({ ...this.fixed });
    for (const [name, value] of query) all.append(name, value);
    for (const [name, value] of Object.entries(extra)) all.set(name, value);
    const text = all.toString();
    return `${this.base}/${path}${text ? "?" + text : ""}`;
  }

  curves(metric, points) {
    return this.address("curves", this.query(CURVES), { metric, points });
  }

  // `trials`: what is in sight, where lines are hidden.
  picture(kind, extra = {}) {
    return this.address(`${this.metric.plot || "gradnorm"}.${kind}`, this.query(PICTURE), extra);
  }

  // The page's own URL says the same; other parameters of it stay.
  keep() {
    const page = new URLSearchParams(location.search);
    for (const control of this.form.elements) if (control.name && !(control.name in this.fixed)) page.delete(control.name);
    for (const [name, value] of this.query()) page.append(name, value);
    const text = page.toString();
    history.replaceState(null, "", location.pathname + (text ? "?" + text : "") + location.hash);
  }
}
