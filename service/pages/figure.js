// A chart that asks for what is in sight: zooming asks again, for finer points; so do new steps.
import { State } from "./state.js";
import { Legend } from "./legend.js";
import { isDark, picture } from "./draw.js";

const CONFIG = {
  displaylogo: false, responsive: true, doubleClick: false, showTips: false, modeBarButtons: [["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d"]],
  displayModeBar: matchMedia("(pointer: coarse)").matches ? false : "hover",
};
const MAX_POINTS = 60_000; // of all lines together, so that drawing them stays quick
const LIVE_PAUSE = 2000; // milliseconds between two looks at a live run
const RETRY = 5000; // milliseconds until a service that is away is asked again

export class Figure {
  constructor(section) {
    this.section = section;
    this.state = new State(section);
    this.cycles = JSON.parse(section.dataset.cycles);
    const find = (selector) => section.querySelector(selector);
    this.box = find(".figure");
    this.plot = find(".plot");
    this.image = find(".drawn");
    this.say = find(".say");
    this.sampled = find(".sampled");
    this.whole = find(".whole");
    this.legend = new Legend(find(".legend"), this.cycles, (keys) => this.hide(keys));
    this.answers = null;
    this.state.onChange(() => this.changed());
    this.whole.addEventListener("click", () => this.zoom({ from: "", to: "", ymin: "", ymax: "" }));
    find(".copy").addEventListener("click", () => this.copy(find(".copied")));
    document.addEventListener("theme", () => this.themed());
  }

  changed() {
    this.state.keep();
    this.refresh();
  }

  async refresh() {
    this.links();
    this.section.querySelector(".view").hidden = this.state.metric.onlyPicture;
    if (this.state.metric.onlyPicture || this.state.get("view") === "picture") return this.showPicture();
    return this.showChart();
  }

  async showPicture() {
    this.sampled.textContent = "";
    this.whole.hidden = true;
    this.legend.show([], new Set());
    const width = Math.max(340, Math.min(1000, this.box.clientWidth - 10)); // its text keeps its size on a phone
    const shape = width < 1000 ? { width, height: Math.round(Math.max(360, width * 0.6)) } : {};
    const source = this.state.picture("png", { ...this.inSight(), ...shape, ...(isDark() ? { theme: "dark" } : {}) });
    try {
      await this.load(source);
      this.show(this.image);
    } catch (error) {
      this.refused(error);
    }
  }

  // Of the same address an image shows what it has, however old; what goes on is fetched each time.
  async load(source) {
    if (!this.live) {
      this.image.src = source;
      return this.image.decode().catch(() => fetchOk(source)); // which says why
    }
    const content = await (await fetchOk(source)).blob();
    URL.revokeObjectURL(this.image.src);
    this.image.src = URL.createObjectURL(content);
    return this.image.decode();
  }

  async showChart() {
    this.request?.abort();
    const request = (this.request = new AbortController());
    this.box.classList.add("busy");
    try {
      const answers = await this.ask(request.signal);
      if (request.signal.aborted) return;
      this.answers = answers;
      await this.draw();
    } catch (error) {
      if (error.name !== "AbortError") this.refused(error);
    } finally {
      if (this.request === request) this.box.classList.remove("busy");
    }
  }

  async ask(signal) {
    const lines = this.answers?.curves.length || 4;
    const width = this.box.clientWidth || 800;
    const points = Math.round(Math.max(200, Math.min(2 * width, MAX_POINTS / lines)) / 100) * 100;
    const metric = this.state.metric.name;
    const wanted = [metric, ...(metric === "grad_norm" && this.state.get("clipped") ? ["grad_norm_clipped"] : [])];
    const answers = await Promise.all(wanted.map(async (name) => (await fetchOk(this.state.curves(name, points), signal)).json()));
    return { ...answers[0], clipped: answers[1]?.curves ?? [] };
  }

  async draw() {
    const { curves, clipped } = this.answers;
    this.whole.hidden = !["from", "to", "ymin", "ymax"].some((name) => this.state.get(name) !== "");
    this.sampled.textContent = sampling(this.answers);
    const hidden = this.state.hidden;
    this.legend.show(curves, hidden);
    if (!curves.length) return this.tell(`No ${this.state.metric.ylabel.toLowerCase() || "value"} was recorded${this.live ? " yet" : " here"}.`);
    this.show(this.plot);
    const axis = this.state.get("x") || "step";
    const { data, layout, back } = picture(curves, clipped, {
      axis, cycles: this.cycles, metric: this.state.metric, yscale: this.state.get("yscale"), range: this.range(axis),
    });
    for (const trace of data) trace.visible = !hidden.has(trace.meta.key);
    this.back = back;
    await Plotly.react(this.plot, data, layout, CONFIG);
    if (!this.listening) {
      this.listening = true;
      this.plot.on("plotly_relayout", (change) => this.relaid(change));
      this.plot.on("plotly_doubleclick", () => this.zoom({ from: "", to: "", ymin: "", ymax: "" }));
    }
  }

  // What one step is on the axis, least and greatest among the lines.
  scales(axis) {
    const scales = axis === "step" ? [1] : this.answers.curves.map((curve) => curve.scale[axis]);
    return [Math.min(...scales), Math.max(...scales)];
  }

  range(axis) {
    const [from, to] = [this.state.get("from"), this.state.get("to")];
    const [, most] = this.scales(axis);
    const { curves } = this.answers;
    const ends = curves.flatMap((curve) => [curve.step[0], curve.step.at(-1)].map((step) => step * (axis === "step" ? 1 : curve.scale[axis])));
    const x = [from === "" ? Math.min(...ends) : Number(from) * most, to === "" ? Math.max(...ends) : Number(to) * most];
    const room = (x[1] - x[0]) * 0.015 || 1;
    if (from === "") x[0] -= room;
    if (to === "") x[1] += room;
    return { x, ymin: this.state.get("ymin"), ymax: this.state.get("ymax") };
  }

  // A box was drawn on the chart: its sides become the range that is asked for.
  relaid(change) {
    const x = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    const y = [change["yaxis.range[0]"], change["yaxis.range[1]"]];
    if (change["xaxis.autorange"]) return this.zoom({ from: "", to: "", ymin: "", ymax: "" });
    const wanted = {};
    if (x[0] !== undefined) {
      const [least, most] = this.scales(this.state.get("x") || "step");
      Object.assign(wanted, { from: Math.max(0, Math.floor(x[0] / most)), to: Math.max(0, Math.ceil(x[1] / least)) });
    }
    if (y[0] !== undefined) Object.assign(wanted, { ymin: short(this.back(y[0])), ymax: short(this.back(y[1])) });
    if (Object.keys(wanted).length) this.zoom(wanted);
    return undefined;
  }

  zoom(wanted) {
    for (const [name, value] of Object.entries(wanted)) this.state.set(name, value);
    this.changed();
  }

  hide(keys) {
    this.state.hidden = keys;
    this.state.keep();
    this.links();
    const shown = this.plot.data.map((trace) => !keys.has(trace.meta.key));
    Plotly.restyle(this.plot, { visible: shown });
  }

  // Trials of the lines that are not hidden, for pictures; nothing if none is.
  inSight() {
    const hidden = this.state.hidden;
    const curves = this.answers?.curves ?? [];
    const kept = curves.filter((curve) => !hidden.has(curve.key));
    if (!kept.length || kept.length === curves.length) return {};
    return { trials: [...new Set(kept.flatMap((curve) => curve.trials))].join(",") };
  }

  links() {
    for (const link of this.section.querySelectorAll("a.picture")) link.href = this.state.picture(link.dataset.kind, this.inSight());
  }

  async copy(word) {
    const link = new URL(this.state.picture("png", this.inSight()), location.href).href;
    try {
      await navigator.clipboard.writeText(link);
      word.textContent = "copied";
    } catch {
      word.textContent = link; // no clipboard without https: the link is there to be marked
    }
    setTimeout(() => (word.textContent = ""), 8000);
  }

  themed() {
    if (!this.plot.hidden && this.answers) this.draw();
    else if (!this.image.hidden) this.showPicture();
  }

  get live() {
    return this.section.dataset.live !== undefined;
  }

  // New steps are there: look again, but not at every one of them.
  grown() {
    if (this.waiting || document.hidden) return;
    const wait = Math.max(0, (this.looked ?? 0) + LIVE_PAUSE - performance.now());
    this.waiting = setTimeout(() => {
      this.waiting = undefined;
      this.looked = performance.now();
      this.refresh();
    }, wait);
  }

  show(what) {
    for (const one of [this.plot, this.image, this.say]) one.hidden = one !== what;
  }

  // What is only busy or away is asked again; what is wrong waits for the reader.
  refused(error) {
    this.tell(error.again ? error.message.replace(/\.?$/, ". Trying again.") : error.message);
    clearTimeout(this.later);
    if (error.again) this.later = setTimeout(() => this.refresh(), error.again);
  }

  tell(text) {
    this.say.textContent = text;
    this.show(this.say);
  }
}

const short = (value) => Number(value.toPrecision(5));

function sampling(answer) {
  const total = answer.curves.reduce((most, curve) => Math.max(most, curve.num_total), 0);
  const warnings = answer.warnings.length ? ` ${answer.warnings.slice(0, 3).join("; ")}.` : "";
  if (!total) return warnings;
  const words = answer.sampled
    ? `${total.toLocaleString("en")} steps in sight, more than there are pixels: lowest and highest of each stretch are drawn. Zoom in for every step.`
    : `Every step in sight is drawn (${total.toLocaleString("en")}).`;
  return words + warnings;
}

// An answer that is what was asked for, or an Error with the words of the problem.
async function fetchOk(address, signal) {
  const answer = await fetch(address, { signal }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw Object.assign(new Error("The service doesn't answer."), { again: RETRY });
  });
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({}));
  const again = answer.status === 503 ? 1000 * Number(answer.headers.get("retry-after") ?? 5) : undefined;
  throw Object.assign(new Error(problem.detail ?? `The service answered ${answer.status}.`), { again });
}
