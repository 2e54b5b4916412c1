// Draws a run's timeline: a lane per worker, its spans as boxes, or shares of its time if boxes would be too
// small. A source returns windows of time. A click, or a group's number, highlights that group's way.

omniAsync.lanes = (() => {
  const { element } = omniAsync.elements;
  const GUTTER = 104;
  const AXIS = 22;
  const MOST_HEIGHT = 460;
  const SHORTEST = 0.02; // seconds that a view shows, at least
  const COLOURS = {
    generate: "--busy", read: "--busy", score: "--series-2", train: "--series-3", proximal: "--series-6", publish: "--series-4",
    export: "--series-1", stage: "--series-5", swap: "--series-5", checkpoint: "--series-7", starved: "--starved",
    backpressured: "--backpressured", outage: "--bad", switch: "--series-7",
  };
  const WORK = { rollout: "generate", reader: "read", reward: "score", trainer: "train", publisher: "publish" };

  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const seconds = (value) => `${Number(value.toPrecision(3))} s`;

  /** A source of windows from the spans embedded in the page. */
  function embedded(data) {
    const window = { ...data, boxes: { ...data.boxes } };
    return {
      window: async () => window,
      async group(number) {
        const { boxes, calls = {}, groups = {} } = data;
        const known = groups[number];
        const all = (wanted) => boxes.group.flatMap((group, i) => (group === wanted ? [i] : []));
        let own = all(number);
        if (!known && !own.length) return null;
        const first = (kind, times, among) => Math.min(Infinity, ...among.filter((i) => data.kinds[boxes.kind[i]] === kind).map((i) => times[i]));
        const since = first("generate", boxes.end, own);
        // A group that was not trained was scored before the next group of its prompt was generated.
        const later = Object.keys(groups).map(Number).filter((one) => one > number && groups[one].entry.prompt === known?.entry?.prompt);
        const trained = first("train", boxes.start, own);
        const until = trained < Infinity || !later.length ? trained : first("generate", boxes.end, all(Math.min(...later)));
        for (const [i, prompts] of Object.entries(calls))
          if (prompts.includes(known?.entry?.prompt) && boxes.start[i] >= since && boxes.end[i] <= until) own.push(Number(i));
        own = [...new Set(own)].sort((a, b) => boxes.start[a] - boxes.start[b]);
        const spans = own.map((i) => ({
          lane: boxes.lane[i], kind: data.kinds[boxes.kind[i]], start: boxes.start[i], end: boxes.end[i], args: data.args[boxes.args[i]] ?? {},
        }));
        return { group: number, entry: known?.entry ?? null, prompt: known?.prompt ?? null, spans, media: [] };
      },
    };
  }

  /** Return the view of a lanes block. */
  function draw() {
    const view = { start: 0, end: 1, top: 0, follow: false };
    let [data, source, shown, found, pending, stale, frame] = [null, null, null, null, false, false, 0];
    let palette = {};

    const title = element("h3");
    const hint = element("p", { className: "hint" });
    const canvas = element("canvas", {
      className: "lanes", tabIndex: 0, role: "application", "aria-roledescription": "timeline",
      "aria-keyshortcuts": "ArrowLeft ArrowRight ArrowUp ArrowDown + - Home End",
    });
    const tip = element("div", { className: "lanes-tip hidden", role: "status" });
    const legend = element("ul", { className: "legend lanes-legend" });
    const number = element("input", { type: "text", inputMode: "numeric", pattern: "[0-9]*", size: 8, "aria-label": "Group number", placeholder: "group" });
    const find = element("form", { className: "lanes-find" }, number, element("button", { type: "submit" }, "Follow group"));
    const said = element("span", { className: "hint", role: "status" });
    const button = (label, text, act) => {
      const made = element("button", { type: "button", "aria-label": label, title: label }, text);
      made.addEventListener("click", act);
      return made;
    };
    const newest = button("Follow the newest spans", "Live", () => { view.follow = true; followNewest(); changed(); });
    const controls = element("div", { className: "lanes-controls" },
      button("Earlier", "←", () => pan(-0.25)), button("Later", "→", () => pan(0.25)),
      button("Zoom in", "+", () => zoom(0.5)), button("Zoom out", "−", () => zoom(2)),
      button("Show all", "All", () => { [view.start, view.end, view.follow] = [data.start, finish(), false]; changed(); }), newest, find, said);
    const panel = element("aside", { className: "way hidden", "aria-label": "One group's way", tabIndex: -1 });
    const note = element("p", { className: "note" });
    const box = element("div", { className: "card wide lanes-card" }, title, hint, controls, element("div", { className: "lanes-frame" },
      element("div", { className: "lanes-plot" }, canvas, tip), panel), legend, note);

    // ---- geometry ---------------------------------------------------------------------------------------------------

    const length = () => Math.max(data.end - data.start, SHORTEST);
    const finish = () => data.start + length();
    const rows = () => data.lanes.length;
    const rowHeight = () => (rows() <= 16 ? 26 : rows() <= 60 ? 16 : 9);
    const height = () => clamp(AXIS + rows() * rowHeight(), AXIS + 30, MOST_HEIGHT);
    const width = () => Math.max(canvas.clientWidth - GUTTER, 50);
    const atTime = (time) => GUTTER + ((time - view.start) / (view.end - view.start)) * width();
    const timeAt = (x) => view.start + ((x - GUTTER) / width()) * (view.end - view.start);
    const firstRow = () => Math.floor(view.top / rowHeight());
    const lastRow = () => Math.min(rows(), Math.ceil((view.top + height() - AXIS) / rowHeight()));

    function keepInside() {
      const span = clamp(view.end - view.start, SHORTEST, length() * 1.1);
      view.start = clamp(view.start, data.start - span * 0.5, finish() - span * 0.5);
      view.end = view.start + span;
      view.top = clamp(view.top, 0, Math.max(0, rows() * rowHeight() - (height() - AXIS)));
    }

    function followNewest() {
      const span = Math.min(view.end - view.start, Math.max(length(), 1));
      view.end = finish() + span * 0.02;
      view.start = view.end - span;
    }

    function pan(share) {
      const by = (view.end - view.start) * share;
      [view.start, view.end, view.follow] = [view.start + by, view.end + by, false];
      changed();
    }

    function zoom(factor, around = GUTTER + width() / 2) {
      const at = timeAt(around);
      [view.start, view.end] = [at - (at - view.start) * factor, at + (view.end - at) * factor];
      if (around < GUTTER + width()) view.follow &&= factor > 1;
      changed();
    }

    /** Draw the available data at once, and request missing data. */
    function changed() {
      keepInside();
      newest.setAttribute("aria-pressed", String(view.follow));
      redraw();
      ask();
    }

    // ---- data -------------------------------------------------------------------------------------------------------

    /** Request the visible window, with as much on each side; the old one is shown until the answer arrives. */
    async function ask() {
      if (pending) {
        stale = true;
        return;
      }
      const span = view.end - view.start;
      const [first, last] = [Math.max(0, firstRow() - 20), Math.min(rows(), lastRow() + 20)];
      const enough = shown && !stale && shown.fresh === data.end && shown.from <= view.start && shown.to >= view.end &&
        shown.first <= firstRow() && shown.last >= lastRow() && (shown.boxes || shown.to - shown.from < 8 * span);
      if (enough) return;
      [pending, stale] = [true, false];
      const wanted = { from: view.start - span, to: view.end + span, first, last, columns: Math.round(width() * 3) };
      const fresh = data.end;
      try {
        const came = await source.window(wanted);
        shown = { ...wanted, ...came, fresh };
        if (came.static) Object.assign(shown, { from: -Infinity, to: Infinity, first: 0, last: rows() });
        said.textContent = "";
      } catch (error) {
        said.textContent = `The timeline did not come: ${error.message}`;
        shown = { ...wanted, ...(shown ?? { boxes: null, busy: null }), fresh };
      } finally {
        pending = false;
      }
      redraw();
      if (stale) ask();
    }

    async function follow(group) {
      said.textContent = "";
      let came = null;
      try {
        came = await source.group(group);
      } catch (error) {
        said.textContent = `The group did not come: ${error.message}`;
        return;
      }
      if (came === null) {
        said.textContent = `There is no group ${group} here.`;
        return;
      }
      found = came;
      const spans = found.spans;
      if (spans.length) {
        const [start, end] = [Math.min(...spans.map((one) => one.start)), Math.max(...spans.map((one) => one.end))];
        const around = Math.max((end - start) * 0.15, SHORTEST);
        if (start < view.start || end > view.end || (end - start) < 0.05 * (view.end - view.start))
          [view.start, view.end, view.follow] = [start - around, end + around, false];
        const top = Math.min(...spans.map((one) => one.lane)) * rowHeight();
        const bottom = (Math.max(...spans.map((one) => one.lane)) + 1) * rowHeight();
        if (top < view.top || bottom > view.top + height() - AXIS) view.top = top;
      }
      number.value = String(group);
      omniAsync.way.show(panel, found, data.lanes, close);
      changed();
    }

    function close() {
      found = null;
      panel.classList.add("hidden");
      canvas.focus();
      redraw();
    }

    // ---- drawing ----------------------------------------------------------------------------------------------------

    function redraw() {
      if (!frame) frame = requestAnimationFrame(paint);
    }

    function colours() {
      const style = getComputedStyle(document.documentElement);
      const of = (name) => style.getPropertyValue(name).trim();
      palette = { ink: of("--ink"), soft: of("--soft"), line: of("--line"), card: of("--card"), accent: of("--accent"), font: style.fontFamily || "sans-serif" };
      for (const [kind, name] of Object.entries(COLOURS)) palette[kind] = of(name);
      palette.other = of("--series-0");
    }

    const colourOf = (kind) => palette[kind] ?? palette.other;
    const workOf = (lane) => WORK[/^[^-.\d]+/.exec(lane)?.[0]] ?? "other";

    function paint() {
      frame = 0;
      if (!data || !canvas.clientWidth) return;
      colours();
      const scale = window.devicePixelRatio || 1;
      const [wide, high] = [canvas.clientWidth, height()];
      canvas.style.height = `${high}px`;
      if (canvas.width !== Math.round(wide * scale) || canvas.height !== Math.round(high * scale)) {
        canvas.width = Math.round(wide * scale);
        canvas.height = Math.round(high * scale);
      }
      const ink = canvas.getContext("2d");
      ink.setTransform(scale, 0, 0, scale, 0, 0);
      ink.clearRect(0, 0, wide, high);
      ink.font = `12px ${palette.font}`;
      paintRows(ink, wide, high);
      ink.save();
      ink.beginPath();
      ink.rect(GUTTER, AXIS, wide - GUTTER, high - AXIS);
      ink.clip();
      if (shown?.boxes) paintBoxes(ink, shown.boxes);
      else if (shown?.busy) paintShares(ink);
      if (found) paintWay(ink);
      ink.restore();
      paintAxis(ink, wide);
    }

    const rowTop = (lane) => AXIS + lane * rowHeight() - view.top;

    function paintRows(ink, wide, high) {
      const tall = rowHeight();
      ink.strokeStyle = palette.line;
      ink.textBaseline = "middle";
      const every = Math.max(1, Math.ceil(13 / tall));
      for (let lane = firstRow(); lane < lastRow(); lane += 1) {
        const top = rowTop(lane);
        if (lane % every === 0 && top + tall / 2 > AXIS) {
          ink.fillStyle = palette.soft;
          ink.fillText(data.lanes[lane], 2, top + tall / 2, GUTTER - 8);
        }
        if (tall > 12) {
          ink.beginPath();
          ink.moveTo(GUTTER, Math.round(top) + 0.5);
          ink.lineTo(wide, Math.round(top) + 0.5);
          ink.stroke();
        }
      }
      const whole = rows() * tall;
      const seen = high - AXIS;
      if (whole > seen) {
        ink.fillStyle = palette.soft;
        ink.fillRect(wide - 4, AXIS + (view.top / whole) * seen, 4, (seen / whole) * seen);
      }
    }

    function paintAxis(ink, wide) {
      ink.clearRect(0, 0, wide, AXIS - 1);
      const span = view.end - view.start;
      const step = [1, 2, 5].flatMap((one) => [-2, -1, 0, 1, 2, 3, 4, 5].map((power) => one * 10 ** power)).sort((a, b) => a - b)
        .find((one) => (one / span) * width() > 90) ?? span;
      ink.fillStyle = palette.soft;
      ink.strokeStyle = palette.line;
      ink.textBaseline = "middle";
      const first = Math.ceil(view.start / step);
      for (let number = 0; number <= span / step; number += 1) { // counted: a large time may not change by a step
        const tick = (first + number) * step;
        const x = Math.round(atTime(tick)) + 0.5;
        if (tick < -1e-9 || x < GUTTER) continue;
        ink.beginPath();
        ink.moveTo(x, AXIS - 5);
        ink.lineTo(x, AXIS);
        ink.stroke();
        const label = `${Number(tick.toFixed(3))} s`;
        if (x + 3 + ink.measureText(label).width <= wide) ink.fillText(label, x + 3, 9);
      }
    }

    /** Where a box lies on the canvas: [left, top, width, height]. */
    function placed(boxes, i, tracks) {
      const [left, right] = [atTime(boxes.start[i]), atTime(boxes.end[i])];
      const inner = rowHeight() - (rowHeight() > 12 ? 4 : 1);
      const many = tracks[boxes.lane[i]] ?? 1;
      const tall = Math.max(inner / many, 0.75);
      return [left, rowTop(boxes.lane[i]) + (rowHeight() > 12 ? 2 : 0.5) + Math.min(boxes.track[i] * (inner / many), inner - tall), Math.max(right - left, 0.6), tall];
    }

    function tracksOf(boxes) {
      const tracks = {};
      boxes.lane.forEach((lane, i) => (tracks[lane] = Math.max(tracks[lane] ?? 1, boxes.track[i] + 1)));
      return tracks;
    }

    function paintBoxes(ink, boxes) {
      const tracks = (boxes.tracks ??= tracksOf(boxes));
      ink.globalAlpha = found ? 0.3 : 0.9;
      const [first, last] = [firstRow(), lastRow()];
      for (let i = 0; i < boxes.start.length; i += 1) {
        if (boxes.lane[i] < first || boxes.lane[i] >= last || boxes.end[i] < view.start || boxes.start[i] > view.end) continue;
        ink.fillStyle = colourOf(shown.kinds[boxes.kind[i]]);
        const [x, y, wide, tall] = placed(boxes, i, tracks);
        ink.fillRect(x, y, wide > 3 ? wide - 0.6 : wide, tall > 3 ? tall - 0.5 : tall);
      }
      ink.globalAlpha = 1;
    }

    function paintShares(ink) {
      const { columns, from, to } = shown;
      const inner = rowHeight() - 1;
      for (let lane = Math.max(firstRow(), shown.first); lane < Math.min(lastRow(), shown.last); lane += 1) {
        const bottom = rowTop(lane) + inner;
        const begin = (lane - shown.first) * columns;
        const [busy, waits] = [colourOf(workOf(data.lanes[lane])), colourOf(workOf(data.lanes[lane]) === "generate" ? "backpressured" : "starved")];
        for (let column = 0; column < columns; column += 1) {
          const left = atTime(from + (column / columns) * (to - from));
          const right = atTime(from + ((column + 1) / columns) * (to - from));
          if (right < GUTTER || left > GUTTER + width()) continue;
          const worked = (shown.busy[begin + column] / 255) * inner;
          const waited = (shown.waits[begin + column] / 255) * (inner - worked);
          ink.fillStyle = busy;
          ink.fillRect(left, bottom - worked, right - left + 0.3, worked);
          if (waited > 0.2) {
            ink.fillStyle = waits;
            ink.fillRect(left, bottom - worked - waited, right - left + 0.3, waited);
          }
        }
      }
    }

    function paintWay(ink) {
      const inner = rowHeight() - 2;
      ink.lineWidth = 1.5;
      ink.strokeStyle = palette.ink;
      ink.beginPath();
      found.spans.forEach((span, i) => {
        const [x, y] = [atTime((span.start + span.end) / 2), rowTop(span.lane) + rowHeight() / 2];
        if (i) ink.lineTo(x, y);
        else ink.moveTo(x, y);
      });
      ink.globalAlpha = 0.5;
      ink.stroke();
      ink.globalAlpha = 1;
      for (const span of found.spans) {
        const [left, right] = [atTime(span.start), atTime(span.end)];
        ink.fillStyle = colourOf(span.kind);
        ink.fillRect(left, rowTop(span.lane) + 1, Math.max(right - left, 2), inner);
        ink.strokeRect(left, rowTop(span.lane) + 1, Math.max(right - left, 2), inner);
      }
      ink.lineWidth = 1;
    }

    // ---- pointer, touch, keyboard -----------------------------------------------------------------------------------

    const pointers = new Map();
    let moved = false;
    const place = (event) => {
      const bounds = canvas.getBoundingClientRect();
      return [event.clientX - bounds.left, event.clientY - bounds.top];
    };

    function boxAt([x, y]) {
      if (!shown?.boxes || x < GUTTER || y < AXIS) return null;
      const boxes = shown.boxes;
      const tracks = (boxes.tracks ??= tracksOf(boxes));
      for (let i = boxes.start.length - 1; i >= 0; i -= 1) {
        const [left, top, wide, tall] = placed(boxes, i, tracks);
        if (x >= left - 1 && x <= left + wide + 1 && y >= top && y <= top + tall) return i;
      }
      return null;
    }

    function showTip(event) {
      const at = place(event);
      const i = boxAt(at);
      tip.classList.toggle("hidden", i === null);
      canvas.style.cursor = i === null ? "grab" : shown.boxes.group[i] >= 0 ? "pointer" : "default";
      if (i === null) return;
      const { boxes, kinds } = shown;
      const group = boxes.group[i] >= 0 ? `, group ${boxes.group[i]}` : "";
      tip.textContent = `${data.lanes[boxes.lane[i]]}: ${kinds[boxes.kind[i]]}${group}, ${seconds(boxes.end[i] - boxes.start[i])} at ${seconds(boxes.start[i])}`;
      tip.style.left = `${clamp(at[0] + 12, 0, Math.max(0, canvas.clientWidth - tip.offsetWidth - 4))}px`;
      tip.style.top = `${at[1] + 16}px`;
    }

    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, place(event));
      moved = false;
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (!before) {
        showTip(event);
        return;
      }
      const now = place(event);
      if (pointers.size === 1) {
        if (Math.hypot(now[0] - before[0], now[1] - before[1]) < 4 && !moved) return;
        moved = true;
        const by = ((before[0] - now[0]) / width()) * (view.end - view.start);
        [view.start, view.end, view.follow] = [view.start + by, view.end + by, false];
        view.top += before[1] - now[1];
      } else {
        moved = true;
        const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
        const [was, is] = [Math.abs(before[0] - other[0]), Math.abs(now[0] - other[0])];
        if (was > 10 && is > 10) {
          const at = timeAt((now[0] + other[0]) / 2);
          [view.start, view.end] = [at - ((at - view.start) * was) / is, at + ((view.end - at) * was) / is];
        }
      }
      pointers.set(event.pointerId, now);
      changed();
    });
    const released = (event) => {
      pointers.delete(event.pointerId);
      if (event.type === "pointerup" && !moved) {
        const i = boxAt(place(event));
        if (i !== null && shown.boxes.group[i] >= 0) follow(shown.boxes.group[i]);
      }
    };
    canvas.addEventListener("pointerup", released);
    canvas.addEventListener("pointercancel", released);
    canvas.addEventListener("pointerleave", () => tip.classList.add("hidden"));
    canvas.addEventListener("wheel", (event) => {
      // The wheel scrolls the page unless the canvas has the focus.
      if (!event.ctrlKey && document.activeElement !== canvas) return;
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / width());
      else zoom(Math.exp(clamp(event.deltaY, -200, 200) / 300), Math.max(place(event)[0], GUTTER));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const rowsBy = (by) => { view.top += by * rowHeight(); changed(); };
      const acts = {
        ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), ArrowUp: () => rowsBy(-3), ArrowDown: () => rowsBy(3),
        PageUp: () => rowsBy(-20), PageDown: () => rowsBy(20), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6),
        Home: () => { const span = view.end - view.start; [view.start, view.end, view.follow] = [data.start, data.start + span, false]; changed(); },
        End: () => { followNewest(); changed(); }, Escape: () => found && close(),
      };
      if (event.ctrlKey || event.metaKey || !acts[event.key]) return;
      event.preventDefault();
      acts[event.key]();
    });
    find.addEventListener("submit", (event) => {
      event.preventDefault();
      const wanted = number.value.trim();
      if (/^\d{1,9}$/.test(wanted)) follow(Number(wanted));
      else said.textContent = "A group is a number, from 0.";
    });
    const sized = new ResizeObserver(() => data && changed());
    sized.observe(canvas);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", redraw);

    // ---- the page's elements ----------------------------------------------------------------------------------------

    function key() {
      const item = (kind) => {
        const swatch = element("span", { className: "swatch" });
        swatch.style.background = `var(${COLOURS[kind] ?? "--series-0"})`;
        return element("li", {}, swatch, kind);
      };
      const kinds = [...new Set(data.kinds)];
      if (legend.dataset.kinds !== kinds.join()) {
        legend.dataset.kinds = kinds.join();
        legend.replaceChildren(...kinds.map(item));
      }
    }

    return {
      element: box,
      update(block) {
        const first = data === null;
        data = block.data;
        title.textContent = block.title;
        hint.textContent = block.hint;
        note.textContent = data.note ?? "";
        canvas.setAttribute("aria-label", `${block.title}: ${data.lanes.length} lanes. Group numbers can be followed with the field above.`);
        const live = Boolean(data.live);
        newest.classList.toggle("hidden", !live);
        if (first || !live) {
          source = live ? omniAsync.live.source : embedded(data);
          if (first) {
            const span = live ? Math.min(length(), data.first ?? 60) : length();
            [view.start, view.end, view.follow] = [finish() - span, finish(), live];
          }
          shown = live ? shown : null;
        }
        key();
        if (view.follow) followNewest();
        changed();
      },
      dispose() {
        sized.disconnect();
        scheme.removeEventListener("change", redraw);
      },
    };
  }

  return { draw };
})();
