// Draws a chart of a page's data with ECharts, in the colours of the style sheet, with its numbers as a table.

omniAsync.charts = (() => {
  const { element, keyed } = omniAsync.elements;
  const mounted = new Set();
  const numbers = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });

  function shown(value) {
    if (value === null || value === undefined) return "-";
    return value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential(1) : numbers.format(value);
  }

  const titled = (axis) => (axis.unit && axis.label ? `${axis.label} (${axis.unit})` : axis.label || axis.unit);

  // ---- colours ----

  function variable(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }

  /** Return a colour between three of the style sheet: 0 is the freshest or first, 1 the oldest or last. */
  function shade(share) {
    const stops = [0, 1, 2].map((stop) => variable(`age-${stop}`).match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16)));
    const at = Math.min(share * 2, 1.999);
    const [from, to] = [stops[Math.floor(at)], stops[Math.floor(at) + 1]];
    const mixed = from.map((part, i) => Math.round(part + (to[i] - part) * (at % 1)));
    return `rgb(${mixed.join(", ")})`;
  }

  function colour(key) {
    if (typeof key === "number") return variable(`series-${key % 8}`);
    return key.startsWith("age-") ? shade(Number(key.slice(4))) : variable(key);
  }

  // ---- ECharts' option ----

  const points = (series, axis, values) => values.map((value, i) => [series.x[axis][i], value]);

  function drawn(series, chart, axis) {
    const ink = colour(series.colour);
    const area = chart.form === "area";
    return {
      name: series.name,
      type: chart.form === "bar" ? "bar" : "line",
      data: points(series, axis, series.y),
      stack: chart.stacked ? "all" : undefined,
      step: area ? "middle" : false,
      barCategoryGap: "8%",
      barMaxWidth: 40,
      showSymbol: !area && series.y.length <= 30,
      symbolSize: 6,
      z: series.faint ? 2 : 3,
      lineStyle: { width: area ? 0 : series.faint ? 1 : 2, opacity: series.faint ? 0.45 : 1 },
      itemStyle: { color: ink },
      areaStyle: area ? { opacity: 1 } : undefined,
      emphasis: { disabled: true },
    };
  }

  /** A band is drawn as an area between two curves that are not named. */
  function band(series, axis, number) {
    const usual = { type: "line", stack: `band-${number}`, stackStrategy: "all", symbol: "none", silent: true };
    const hidden = { lineStyle: { opacity: 0 }, emphasis: { disabled: true }, tooltip: { show: false } };
    const heights = series.high.map((high, i) => (high === null ? null : high - series.low[i]));
    const fill = { areaStyle: { color: colour(series.colour), opacity: 0.16 } };
    return [
      { ...usual, ...hidden, data: points(series, axis, series.low) },
      { ...usual, ...hidden, ...fill, data: points(series, axis, heights) },
    ];
  }

  function marked(mark) {
    const line = { color: variable("soft"), type: "dashed", width: 1 };
    const label = { formatter: mark.label, position: "insideEndTop", color: variable("soft"), fontSize: 11 };
    return { silent: true, symbol: "none", lineStyle: line, label, data: [{ yAxis: mark.value }] };
  }

  function axisOf(axis, low, high) {
    const [ink, line] = [variable("soft"), variable("line")];
    return {
      type: "value",
      min: low ?? undefined,
      max: high ?? undefined,
      name: titled(axis),
      nameLocation: "middle",
      nameTextStyle: { color: ink, fontSize: 12 },
      axisLabel: { color: ink, fontSize: 11, hideOverlap: true, formatter: (value) => shown(value) },
      axisLine: { show: true, lineStyle: { color: line } },
      axisTick: { show: false },
      splitLine: { lineStyle: { color: line, type: "solid", opacity: 0.7 } },
    };
  }

  function extent(chart, axis) {
    const values = chart.series.flatMap((series) => series.x[axis]);
    const [low, high] = [values.reduce((a, b) => Math.min(a, b), 0), values.reduce((a, b) => Math.max(a, b), 0)];
    return low < high ? [low, high] : [0, 1];
  }

  /** Return a scale that includes marks, too, unless they would leave too little room for the curves. */
  function highest(chart) {
    if (chart.y.high !== null) return chart.y.high;
    const values = chart.series.flatMap((series) => series.y).filter((value) => value !== null);
    const top = values.reduce((a, b) => Math.max(a, b), 0);
    const marks = chart.marks.map((mark) => mark.value).filter((value) => value <= top * 4);
    return marks.length ? Math.max(top, ...marks) * 1.12 : null;
  }

  /** Label the end of the data only if it is a round number. */
  function horizontal(axis, high) {
    return { ...axis, axisLabel: { ...axis.axisLabel, showMaxLabel: Number.isInteger(high) ? null : false } };
  }

  /** Hide the label of the scale's end if a mark extends the scale, because it is no round number. */
  function vertical(axis, high) {
    return { ...axis, axisLabel: { ...axis.axisLabel, showMaxLabel: axis.max === undefined || high !== null ? null : false } };
  }

  function option(chart, axis, off) {
    const xs = chart.xs[axis];
    const bars = chart.form === "bar";
    const [low, high] = extent(chart, axis);
    const series = chart.series.map((one) => drawn(one, chart, axis));
    if (series.length && chart.marks.length) series[0].markLine = marked(chart.marks[0]);
    const bands = chart.series.flatMap((one, number) => (one.low && !off.has(one.name) ? band(one, axis, number) : []));
    const tooltip = { color: variable("ink"), fontSize: 12 };
    return {
      animation: false,
      textStyle: { fontFamily: "system-ui, sans-serif" },
      grid: { left: 54, right: 14, top: 14, bottom: 46 },
      legend: { show: false, selected: Object.fromEntries([...off].map((name) => [name, false])) },
      tooltip: {
        trigger: "axis",
        renderMode: "richText",
        confine: true,
        backgroundColor: variable("card"),
        borderColor: variable("line"),
        textStyle: tooltip,
        valueFormatter: shown,
      },
      xAxis: { ...horizontal(axisOf(xs, bars ? null : low, bars ? null : high), high), nameGap: 26, splitLine: { show: false } },
      yAxis: { ...vertical(axisOf(chart.y, chart.y.low, highest(chart)), chart.y.high), scale: true, nameGap: 40 },
      series: [...series, ...bands],
    };
  }

  // ---- the figure ----

  /** A curve's name with its colour, which shows or hides it: `off` has the names of hidden curves. */
  function named(first, off, draw) {
    const swatch = element("span", { className: "swatch" });
    const button = element("button", { type: "button", "aria-pressed": String(!off.has(first.name)) }, swatch, first.name);
    button.addEventListener("click", () => {
      if (!off.delete(first.name)) off.add(first.name);
      button.setAttribute("aria-pressed", String(!off.has(first.name)));
      draw();
    });
    return {
      element: element("li", {}, button),
      update({ ink, faint }) {
        swatch.style.background = ink;
        swatch.style.opacity = faint ? 0.5 : 1;
      },
    };
  }

  function rows(chart, axis) {
    const at = new Map();
    chart.series.forEach((series, column) => {
      series.x[axis].forEach((x, i) => {
        if (!at.has(x)) at.set(x, new Array(chart.series.length).fill(null));
        at.get(x)[column] = series.y[i];
      });
    });
    return [...at].sort(([a], [b]) => a - b);
  }

  function numberTable(chart, axis) {
    const cell = (tag, text) => element(tag, { className: "number" }, text);
    const heads = [cell("th", titled(chart.xs[axis])), ...chart.series.map((series) => cell("th", series.name))];
    const body = rows(chart, axis).map(([x, values]) =>
      element("tr", {}, cell("td", shown(x)), ...values.map((value) => cell("td", shown(value)))),
    );
    const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...body));
    return element("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": `Numbers of ${chart.title}` }, table);
  }

  /** Return the view of a chart. `state.axis` is the horizontal axis that the reader chose, if the chart has it. */
  function figure(first, state) {
    const title = element("h3");
    const hint = element("p", { className: "hint" });
    const names = element("ul", { className: "legend" });
    const plotted = element("div", { className: "plot", role: "img" });
    const note = element("p", { className: "note" });
    const numbersBox = element("details", {}, element("summary", {}, "Numbers as a table"));
    const box = element("figure", { className: "card chart" }, element("figcaption", {}, title, hint), names, plotted, note, numbersBox);
    const off = new Set();
    const showNames = keyed(names, (series) => series.name, (series) => named(series, off, draw));
    let [plot, chart] = [null, first];

    const axis = () => (state.axis in chart.xs ? state.axis : Object.keys(chart.xs)[0]);

    function table() {
      numbersBox.querySelector(".scroll")?.remove();
      if (numbersBox.open) numbersBox.append(numberTable(chart, axis()));
    }
    numbersBox.addEventListener("toggle", table);

    function draw() {
      if (!plotted.isConnected || !plotted.clientWidth) return;
      plot ??= echarts.init(plotted, null, { renderer: "canvas" });
      plot.resize();
      plot.setOption(option(chart, axis(), off), { notMerge: true });
      const legend = chart.series.map(({ name, faint, colour: key }) => ({ name, faint, ink: colour(key) }));
      showNames(legend.length > 1 ? legend : []);
      table();
    }

    function update(changed) {
      chart = changed;
      box.id = `chart-${chart.id}`;
      box.classList.toggle("wide", chart.wide);
      title.textContent = chart.title;
      hint.textContent = chart.hint;
      note.textContent = chart.note;
      plotted.setAttribute("aria-label", `Chart: ${chart.title}. ${chart.hint}`);
      draw();
    }

    const sizes = new ResizeObserver(draw);
    sizes.observe(plotted);
    /** Draw a chart that was not on the page yet when its data arrived. */
    const appear = () => plot === null && draw();
    const view = { element: box, update, draw, appear, dispose };
    function dispose() {
      sizes.disconnect();
      mounted.delete(view);
      plot?.dispose();
    }
    mounted.add(view);
    return view;
  }

  /** Redraw all charts after a change of axis, or of light and dark. */
  const redraw = () => mounted.forEach((view) => view.draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  const appear = () => mounted.forEach((view) => view.appear());

  return { figure, redraw, appear, colour };
})();
