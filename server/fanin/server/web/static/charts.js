// Charts of the values in a table: the table is their source and their alternative.
const HEIGHT = 215;
const CHARTS = {
  loss: {
    x: "parent",
    lines: [["loss", "Loss", "--s1"], ["held_loss", "Held out", "--s2", "number"]],
    band: ["loss_p10", "loss_p90"],
    format: (value) => value.toFixed(4),
    axis: (value) => String(Number(value.toPrecision(3))),
  },
  accuracy: {
    x: "parent",
    lines: [["float", "float", "--s1"], ["int8", "int8", "--s2"], ["held_float", "held out", "--download", "number"]],
    band: ["float_p10", "float_p90"],
    format: (value) => `${(100 * value).toFixed(2)} %`,
    axis: (value) => `${Number((100 * value).toPrecision(3))} %`,
  },
  bytes: {
    isFromZero: true,
    x: "number",
    lines: [["down", "down", "--s1"], ["up", "up", "--s2"]],
    format: size,
  },
  grid: {
    x: "round",
    unit: "Round",
    lines: [["coarsest", "coarsest", "--s2"], ["median", "median", "--s1"], ["finest", "finest", "--download"]],
    format: power,
    incrs: [1, 2, 5, 10, 20, 50],
  },
  epsilon: { isFromZero: true, x: "number", lines: [["epsilon", "Epsilon", "--s1"]], format: (value) => value.toFixed(3) },
  seconds: { isFromZero: true, x: "number", lines: [["round_s", "Round", "--s1"]], format: (value) => `${value.toFixed(1)} s` },
};
const drawn = new Map();

function size(value) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(value) < 1000) return `${unit === "B" ? value : value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}

function power(exponent) {
  return `2${[...String(exponent)].map((char) => (char === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[char])).join("")}`;
}

function rowsOf(table) {
  return [...table.tBodies[0].rows].map((row) =>
    Object.fromEntries(
      [...row.cells].map((cell) => [cell.dataset.k, cell.dataset.v === "" ? null : Number(cell.dataset.v)]),
    ),
  );
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function draw(place, spec, rows) {
  const points = new Map();
  const put = (x, key, value) => {
    if (x === null || value === null) return;
    points.set(x, { ...(points.get(x) ?? {}), [key]: value });
  };
  const keys = [...(spec.band ?? []), ...spec.lines.map(([key]) => key)];
  const axis = Object.fromEntries(spec.lines.map(([key, , , x]) => [key, x ?? spec.x]));
  for (const row of rows) for (const key of keys) put(row[axis[key] ?? spec.x], key, row[key]);
  const shown = keys.filter((key) => [...points.values()].some((point) => key in point));
  drawn.get(place)?.destroy();
  drawn.delete(place);
  if (!points.size || !spec.lines.some(([key]) => shown.includes(key))) {
    place.replaceChildren(Object.assign(document.createElement("p"), { textContent: "Not recorded yet." }));
    return;
  }
  place.replaceChildren();
  const xs = [...points.keys()].sort((a, b) => a - b);
  const band = (spec.band ?? []).every((key) => shown.includes(key)) ? (spec.band ?? []) : [];
  const lines = spec.lines.filter(([key]) => shown.includes(key));
  const used = [...band, ...lines.map(([key]) => key)];
  const data = [xs, ...used.map((key) => xs.map((x) => points.get(x)[key] ?? null))];
  const text = (value) => (value === null || value === undefined ? "–" : spec.format(value));
  const series = [
    { label: spec.unit ?? "Version", value: (_, value) => (value === null || value === undefined ? "–" : String(value)) },
    ...band.map((key, index) => ({ label: index ? "p90" : "p10", width: 0, points: { show: false }, value: (_, value) => text(value) })),
    ...lines.map(([, label, name], index) => ({
      label,
      stroke: colour(name),
      width: 2,
      dash: index ? [6, 3] : undefined,
      spanGaps: true,
      points: { show: xs.length < 40, size: 5 },
      value: (_, value) => text(value),
    })),
  ];
  const grid = { stroke: colour("--line"), width: 1 };
  const axisStyle = { stroke: colour("--dim"), grid, ticks: grid, font: "12px system-ui" };
  const options = {
    width: place.clientWidth,
    height: HEIGHT,
    series,
    bands: band.length ? [{ series: [2, 1], fill: colour("--band") }] : [],
    scales: { x: { time: false }, ...(spec.isFromZero && { y: { range: (_, min, max) => [0, max * 1.1 || 1] } }) },
    axes: [
      { ...axisStyle, size: 34, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000] },
      { ...axisStyle, size: 74, ...(spec.incrs && { incrs: spec.incrs }), values: (_, values) => values.map((value) => (spec.axis ?? spec.format)(value)) },
    ],
    cursor: { drag: { x: true, y: false } },
  };
  drawn.set(place, new uPlot(options, data, place));
}

export function drawCharts() {
  for (const place of document.querySelectorAll("[data-chart]")) {
    const table = document.getElementById(place.dataset.table);
    if (!table) continue;
    const rows = rowsOf(table);
    place.closest("section").hidden = !rows.length;
    if (rows.length) draw(place, CHARTS[place.dataset.chart], rows);
  }
}
