// From curves, as the API answers them, to plotly's traces: lines with gaps, bands, marks.

export const SYMBOLS = ["circle", "triangle-up", "triangle-down", "diamond", "square", "cross", "x", "triangle-left", "triangle-right", "pentagon", "hexagon"];
const NUM_MARKERS = 12;

const css = (name) => getComputedStyle(document.body).getPropertyValue(name);

// light-dark() is resolved by the browser where it is a colour, not where it is a text.
function colorOf(name) {
  const probe = document.createElement("span");
  probe.style.color = css(name);
  document.body.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}

export const isDark = () => getComputedStyle(document.documentElement).colorScheme.split(" ").length === 1
  ? getComputedStyle(document.documentElement).colorScheme === "dark"
  : matchMedia("(prefers-color-scheme: dark)").matches;

export const colorAt = (cycles, index) => {
  const cycle = isDark() ? cycles.dark : cycles.light;
  return cycle[index % cycle.length];
};

const faded = (color, alpha) => color + Math.round(alpha * 255).toString(16).padStart(2, "0");

// Finite points without a finite neighbour: no line reaches them.
function lonely(values) {
  const found = [];
  for (let i = 0; i < values.length; i++) {
    if (values[i] !== null && (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null) found.push(i);
  }
  return found;
}

const scaleOf = (curve, axis) => (axis === "step" ? 1 : curve.scale[axis]);
const times = (steps, scale) => (scale === 1 ? steps : steps.map((step) => step * scale));

function traces(curve, { axis, cycles, paler }) {
  const scale = scaleOf(curve, axis);
  const color = colorAt(cycles, curve.index);
  const group = { legendgroup: curve.key, meta: { key: curve.key }, showlegend: false };
  const own = { ...group, type: "scatter", name: curve.label };
  const x = times(curve.step, scale);
  const found = [];
  if (curve.high && !paler) {
    const [high, low] = [curve.high, curve.low].map((side) => {
      const kept = side.step.map((step, i) => [step * scale, side.value[i]]).filter((point) => point[1] !== null);
      return { x: kept.map((point) => point[0]), y: kept.map((point) => point[1]) };
    });
    found.push({
      ...own, x: [...high.x, ...low.x.reverse()], y: [...high.y, ...low.y.reverse()], mode: "lines", fill: "toself",
      fillcolor: faded(color, 0.2), line: { width: 0 }, hoverinfo: "skip",
    });
  }
  const template = `%{x:,} · <b>%{y:.4~g}</b><extra>${escape(curve.label)}${paler ? " (after clipping)" : ""}</extra>`;
  const raw = {
    ...own, x, y: curve.value, connectgaps: false, hovertemplate: template,
    line: { color: paler || curve.smooth ? faded(color, 0.45) : color, width: 1.3 }, mode: "lines",
  };
  if (!curve.smooth && !paler) {
    raw.mode = "lines+markers";
    raw.marker = { symbol: SYMBOLS[curve.index % SYMBOLS.length], size: 7, color, maxdisplayed: NUM_MARKERS };
  }
  found.push(raw);
  const alone = lonely(curve.value);
  if (alone.length) {
    const marker = { color, size: 5 };
    found.push({ ...own, x: alone.map((i) => x[i]), y: alone.map((i) => curve.value[i]), mode: "markers", marker, hovertemplate: template });
  }
  if (curve.smooth && !paler) {
    found.push({
      ...own, x: times(curve.smooth.step, scale), y: curve.smooth.value, connectgaps: false, mode: "lines",
      line: { color, width: 2.2 }, hovertemplate: template.replace("<extra>", "<extra>smoothed, "),
    });
  }
  if (!paler) found.push(...marks(curve, scale, color, own));
  return found;
}

// Where trials diverged: a dotted line and a cross; where values aren't finite: ticks at the top.
function marks(curve, scale, color, own) {
  const found = [];
  for (const place of curve.diverged) {
    const at = place.step * scale;
    const text = `seed ${place.seed} diverged at step ${place.step.toLocaleString("en")}: ${escape(place.reason ?? "")}`;
    found.push({ ...own, x: [at, at], y: [0, 1], yaxis: "y2", mode: "lines", line: { color, width: 1, dash: "dot" }, hoverinfo: "skip" });
    if (place.value !== null) {
      const marker = { symbol: "x", size: 11, color, line: { color: colorOf("--text"), width: 1 } };
      found.push({ ...own, x: [at], y: [place.value], mode: "markers", marker, hovertemplate: `${text}<extra></extra>` });
    }
  }
  if (curve.nonfinite.length) {
    const x = [], text = [];
    for (const gap of curve.nonfinite) {
      const steps = gap.first === gap.last ? `step ${gap.first}` : `steps ${gap.first} to ${gap.last}`;
      for (const step of new Set([gap.first, gap.last])) {
        x.push(step * scale);
        text.push(`${gap.value} at ${steps}, seed ${gap.seed}`);
      }
    }
    const marker = { symbol: "line-ns-open", size: 9, color, line: { width: 1.5 } };
    found.push({ ...own, x, y: x.map(() => 0.985), yaxis: "y2", mode: "markers", marker, text, hovertemplate: "%{text}<extra></extra>" });
  }
  return found;
}

// Labels are a study's words; plotly would read tags in them.
const escape = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

// Symlog is not among plotly's axes: asinh does the same, linear near zero and logarithmic far off.
export function symlog(curves) {
  const sizes = curves.flatMap((curve) => curve.value).filter((value) => value).map(Math.abs).sort((a, b) => a - b);
  const unit = sizes.length ? sizes[Math.floor(sizes.length * 0.05)] : 1;
  return { to: (y) => (y === null ? null : Math.asinh(y / unit)), from: (t) => Math.sinh(t) * unit, unit };
}

// Round values of either sign between `low` and `high`: 1, 2, 5 of each decade, or whole decades where there are many.
function roundValues(low, high, least) {
  const [first, last] = [Math.floor(Math.log10(least)), Math.ceil(Math.log10(Math.max(Math.abs(low), Math.abs(high), least)))];
  const steps = last - first > 4 ? [1] : [1, 2, 5];
  const sizes = [];
  for (let power = first; power <= last && sizes.length < 200; power++) sizes.push(...steps.map((step) => step * 10 ** power));
  return [...sizes.map((size) => -size).reverse(), 0, ...sizes].filter((value) => value >= low && value <= high);
}

const ticks = (values, to) => ({
  tickvals: values.map(to),
  ticktext: values.map((value) => (Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(0) : Number(value.toPrecision(2)).toString())),
});

const X_TITLES = { step: "Training step", tokens: "Tokens", time: "Time at mean pace (seconds)" };

// `curves`, and `clipped`: the same after clipping, if they are to be shown.
export function picture(curves, clipped, { axis, metric, yscale, cycles, range }) {
  const scale = yscale || metric.yscale;
  const data = [
    ...clipped.flatMap((curve) => traces(curve, { axis, cycles, paler: true })),
    ...curves.flatMap((curve) => traces(curve, { axis, cycles })),
  ];
  const text = colorOf("--text"), edge = colorOf("--edge");
  const common = { gridcolor: edge, linecolor: text, zeroline: false, ticks: "outside", tickcolor: edge, automargin: true };
  const yaxis = { ...common, title: { text: metric.ylabel, standoff: 8 }, type: scale === "log" ? "log" : "linear", exponentformat: "power" };
  let bend = null;
  if (scale === "symlog") {
    bend = symlog(curves);
    for (const trace of data) if (trace.yaxis !== "y2") {
      trace.customdata = trace.y;
      trace.y = trace.y.map(bend.to);
      trace.hovertemplate = trace.hovertemplate?.replace("%{y:", "%{customdata:");
    }
  }
  const [low, high] = reach(curves, range, scale === "log");
  if (scale === "log" && high >= 2.5 * low) Object.assign(yaxis, ticks(roundValues(low, high, low), (value) => value));
  if (bend) Object.assign(yaxis, ticks(roundValues(low, high, bend.unit), bend.to));
  if (metric.fromZero && scale === "linear") yaxis.rangemode = "tozero";
  const to = scale === "log" ? (y) => (y > 0 ? Math.log10(y) : null) : (bend?.to ?? ((y) => y));
  const sides = [range.ymin, range.ymax].map((side) => (side === "" ? null : to(Number(side))));
  if (sides[0] !== null || sides[1] !== null) Object.assign(yaxis, { range: sides, autorange: sides[0] === null ? "min" : sides[1] === null ? "max" : false });
  const xaxis = { ...common, title: { text: X_TITLES[axis], standoff: 8 }, separatethousands: true, range: range.x, autorange: false };
  const layout = {
    xaxis, yaxis,
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    margin: { l: 58, r: 14, t: 12, b: 46 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: css("font-family") || "sans-serif", size: 12, color: text },
    hoverlabel: { namelength: -1, bgcolor: colorOf("--raised"), bordercolor: edge, font: { color: text } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colorOf("--quiet"), activecolor: text },
    hovermode: "closest", showlegend: false,
    // A finger scrolls the page; there the fields for the range zoom.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
  };
  return { data, layout, back: scale === "log" ? (y) => 10 ** y : (bend?.from ?? ((y) => y)) };
}

// The least and greatest value in sight; of positive ones, for a log axis.
function reach(curves, range, positive) {
  let [low, high] = [Infinity, -Infinity];
  for (const curve of curves) {
    for (const value of [...curve.value, ...(curve.high?.value ?? []), ...(curve.low?.value ?? [])]) {
      if (value === null || (positive && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (range.ymin !== "") low = Number(range.ymin);
  if (range.ymax !== "") high = Number(range.ymax);
  if (!(low <= high)) return [1, 10];
  return positive ? [low / 1.3, high * 1.3] : [low, high];
}
