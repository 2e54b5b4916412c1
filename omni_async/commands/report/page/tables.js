// Shows tables, bars, facts, sentences and commands.

omniAsync.tables = (() => {
  const { element } = omniAsync.elements;
  const NUMBER = /^[-+]?[\d,.]+( ?[%s]|e[-+]?\d+)?$/;
  const written = (cell) => (cell === null ? "-" : String(cell));

  function row(cells, tag, numeric) {
    return element("tr", {}, ...cells.map((cell, i) => element(tag, { className: numeric[i] ? "number" : "" }, written(cell))));
  }

  /** Return the view of a table: long ones are folded, and some can be searched. */
  function table() {
    const [title, hint] = [element("h3"), element("p", { className: "hint" })];
    const search = element("input", { type: "search", placeholder: "Search", "aria-label": "Search the table" });
    const [head, body] = [element("thead"), element("tbody")];
    const scroll = element("div", { className: "scroll", tabIndex: 0, role: "region" }, element("table", {}, head, body));
    const more = element("button", { type: "button", className: "more" });
    const box = element("div", { className: "card wide" }, title, hint, search, scroll, more);
    let [data, open] = [null, false];

    function fill() {
      const wanted = search.value.trim().toLowerCase();
      const found = data.rows.filter((cells) => !wanted || cells.some((cell) => written(cell).toLowerCase().includes(wanted)));
      const numeric = data.columns.map((_, i) => i > 0 && data.rows.every((cells) => cells[i] === null || NUMBER.test(written(cells[i]))));
      const all = open || wanted || found.length <= data.fold;
      head.replaceChildren(row(data.columns, "th", numeric));
      body.replaceChildren(...(all ? found : found.slice(0, data.fold)).map((cells) => row(cells, "td", numeric)));
      more.textContent = open ? "Show fewer rows" : `Show all ${found.length} rows`;
      more.classList.toggle("hidden", Boolean(wanted) || found.length <= data.fold);
    }

    search.addEventListener("input", fill);
    more.addEventListener("click", () => {
      open = !open;
      fill();
    });
    return {
      element: box,
      update(changed) {
        data = changed;
        box.id = `table-${data.id}`;
        title.textContent = data.title;
        hint.textContent = data.hint;
        title.classList.toggle("hidden", !data.title);
        scroll.setAttribute("aria-label", data.title || data.hint);
        search.classList.toggle("hidden", !data.searchable);
        fill();
      },
    };
  }

  function facts() {
    const list = element("dl");
    const shown = (fact) =>
      element("div", {}, element("dt", {}, fact.label),
        element("dd", { className: "value" }, fact.value), element("dd", { className: "detail" }, fact.detail));
    return {
      element: list,
      update(data) {
        list.className = `facts wide ${data.compact ? "compact" : ""}`;
        list.replaceChildren(...data.items.map(shown));
      },
    };
  }

  function text() {
    const paragraph = element("p");
    return {
      element: paragraph,
      update(data) {
        paragraph.className = `text wide ${data.tone}`;
        paragraph.textContent = data.text;
      },
    };
  }

  /** Return bars from the middle, all on one scale; uncertain bars are paler. */
  function gains() {
    const [title, hint] = [element("h3"), element("p", { className: "hint" })];
    const list = element("ul", { className: "gains" });
    const percent = (value) => `${(100 * value).toFixed(1)} %`;

    function shown(item, most) {
      const place = (from, to) => ({ left: `${50 + (50 * from) / most}%`, width: `${(50 * (to - from)) / most}%` });
      const sure = Math.abs(item.gain) > item.uncertainty;
      const bar = element("span", { className: `bar ${sure ? "" : "unsure"} ${item.gain < 0 ? "loss" : ""}` });
      const line = element("span", { className: "line" });
      Object.assign(bar.style, place(Math.min(0, item.gain), Math.max(0, item.gain)));
      Object.assign(line.style, place(item.gain - item.uncertainty, item.gain + item.uncertainty));
      const said = `${item.gain >= 0 ? "+" : ""}${percent(item.gain)} ± ${percent(item.uncertainty)}`;
      return element("li", {}, element("span", { className: "what" }, item.name, element("code", {}, item.how)),
        element("span", { className: "track", "aria-hidden": "true" }, bar, line), element("span", { className: "said" }, said));
    }

    return {
      element: element("div", { className: "card wide" }, title, hint, list),
      update(data) {
        title.textContent = data.title;
        hint.textContent = data.hint;
        const most = Math.max(0.01, ...data.items.map((item) => Math.abs(item.gain) + item.uncertainty));
        list.replaceChildren(...data.items.map((item) => shown(item, most)));
      },
    };
  }

  /** Return bars of coloured parts, all on one scale, with their sums. */
  function stacks() {
    const [title, hint] = [element("h3"), element("p", { className: "hint" })];
    const [legend, list] = [element("ul", { className: "legend stacks-legend" }), element("ul", { className: "stacks" })];
    const ink = (colour) => `var(--${typeof colour === "number" ? `series-${colour % 8}` : colour})`;
    const total = (item) => item.values.reduce((sum, value) => sum + value, 0);
    const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

    function part([, colour], share) {
      const bar = element("span");
      Object.assign(bar.style, { background: ink(colour), width: `${100 * share}%` });
      return bar;
    }

    function named([name, colour]) {
      const swatch = element("span", { className: "swatch" });
      swatch.style.background = ink(colour);
      return element("li", {}, swatch, name);
    }

    function shown(item, { parts, unit }, most) {
      const bars = parts.map((one, i) => part(one, Math.max(0, item.values[i]) / most));
      return element("li", {}, element("span", { className: "what" }, item.name),
        element("span", { className: "stack", "aria-hidden": "true" }, ...bars),
        element("span", { className: "said" }, `${digits.format(total(item))} ${unit}`));
    }

    return {
      element: element("div", { className: "card wide" }, title, hint, legend, list),
      update(data) {
        title.textContent = data.title;
        hint.textContent = data.hint;
        const most = Math.max(1e-9, ...data.items.map(total));
        legend.replaceChildren(...data.parts.map(named));
        list.replaceChildren(...data.items.map((item) => shown(item, data, most)));
      },
    };
  }

  /** Copy a command; if the page may not write to the clipboard, select the command instead. */
  async function copy(code, button) {
    getSelection().selectAllChildren(code);
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      if (!document.execCommand("copy")) return;
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }

  function commands() {
    const list = element("ul", { className: "commands" });
    function shown([command, purpose]) {
      const [code, button] = [element("code", {}, command), element("button", { type: "button", "aria-label": `Copy: ${command}` }, "Copy")];
      button.addEventListener("click", () => copy(code, button));
      return element("li", {}, element("p", {}, purpose), code, button);
    }
    return {
      element: element("div", { className: "card wide" }, list),
      update: (data) => list.replaceChildren(...data.items.map(shown)),
    };
  }

  return { table, facts, text, commands, gains, stacks };
})();
