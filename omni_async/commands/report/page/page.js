// Shows a page's data: `render(page)` once, `update(page)` whenever some of it changed. Both may be called again with the
// same data, and `update` with only some sections; the reader's chosen, open or focused elements keep their state.

omniAsync.page = (() => {
  const { element, keyed, choice } = omniAsync.elements;

  /** Return a page that draws into the document's own places for it. */
  function create() {
    const state = { axis: "update", sections: new Map() };
    let first = true;
    const views = {
      chart: (block) => omniAsync.charts.figure(block, state),
      samples: () => omniAsync.samples.draw(),
      lanes: (block) => omniAsync.lanes.draw(block, state),
      details,
      ...omniAsync.tables,
    };
    const block = (data) => views[data.kind](data);
    /** Whether a chart of the section has both horizontal axes. */
    const hasAxes = ({ blocks, tabs }) =>
      [blocks, ...tabs.map((tab) => tab.blocks)].flat().some((one) => one.kind === "chart" && Object.keys(one.xs).length > 1);
    const keyOf = (data, position) => `${data.kind} ${data.id ?? position}`;

    function blocks() {
      const box = element("div", { className: "blocks" });
      return { element: box, update: keyed(box, keyOf, block) };
    }

    /** Return the view of blocks that the reader opens by their summary. */
    function details() {
      const [summary, own] = [element("summary"), blocks()];
      const box = element("details", { className: "more-blocks wide" }, summary, own.element);
      return {
        element: box,
        update(data) {
          summary.textContent = data.summary;
          own.update(data.blocks.map((one) => ({ ...one, run: data.run })));
        },
      };
    }

    /** Return the view of each run's blocks; one run is shown at a time. */
    function tabbed() {
      const [box, own] = [element("div"), blocks()];
      let [tabs, chosen] = [[], null];
      const pick = choice("Run", (run) => {
        chosen = run;
        show();
      });
      function show() {
        const tab = tabs.find((one) => one.run === chosen) ?? tabs[0];
        own.update(tab ? tab.blocks.map((data) => ({ ...data, run: tab.run })) : []);
      }
      box.append(pick.element, own.element);
      return {
        element: box,
        update(changed) {
          tabs = changed;
          pick.update(tabs.map((tab) => ({ value: tab.run, label: tab.run })));
          show();
        },
      };
    }

    function section(first) {
      const title = element(first.id === "verdict" ? "h1" : "h2", { id: `${first.id}-title` });
      const [lead, brief] = [element("p", { className: "lead" }), element("span", { className: "brief" })];
      const [common, perRun] = [blocks(), tabbed()];
      const content = [lead, common.element, perRun.element];
      const parts = first.folded
        ? [element("details", { className: "fold" }, element("summary", {}, title, " ", brief), ...content)]
        : [title, ...content];
      const box = element("section", { id: first.id, "aria-labelledby": title.id }, ...parts);
      return {
        element: box,
        update(data) {
          title.textContent = data.title;
          lead.textContent = data.lead;
          brief.textContent = data.brief;
          lead.classList.toggle("hidden", !data.lead);
          common.element.classList.toggle("hidden", !data.blocks.length);
          common.update(data.blocks);
          perRun.element.classList.toggle("hidden", !data.tabs.length);
          perRun.update(data.tabs);
        },
      };
    }

    /** Open a folded section. */
    function open(id) {
      const folded = document.querySelector(`#${CSS.escape(id)} > details.fold`);
      if (folded) folded.open = true;
    }

    /** Return a button that opens all folded parts, or closes them if all are open. */
    function opener() {
      const button = element("button", { type: "button" }, "Open all");
      button.addEventListener("click", () => {
        const opened = button.textContent === "Open all";
        for (const one of document.querySelectorAll("details.fold, details.more-blocks")) one.open = opened;
        button.textContent = opened ? "Close all" : "Open all";
      });
      return button;
    }

    function link(first) {
      const anchor = element("a", { href: `#${first.id}` });
      anchor.addEventListener("click", () => open(first.id));
      const update = (data) => (anchor.textContent = data.id === "verdict" ? "Verdict" : data.title);
      return { element: element("li", {}, anchor), update };
    }

    function run() {
      const [name, pill] = [element("span"), element("span")];
      return {
        element: element("span", { className: "run" }, name, pill),
        update(data) {
          name.textContent = data.id;
          name.title = data.label;
          pill.textContent = data.status;
          pill.className = `pill ${data.status}`;
        },
      };
    }

    const place = (id) => document.getElementById(id);
    const list = element("ul");
    const axes = choice("Horizontal axis", (axis) => {
      state.axis = axis;
      omniAsync.charts.redraw();
    });
    axes.update([{ value: "update", label: "updates" }, { value: "minutes", label: "time" }]);
    place("contents").replaceChildren(list);
    place("tools").replaceChildren(axes.element, opener());
    place("page").replaceChildren();
    place("runs").replaceChildren();
    const showRuns = keyed(place("runs"), (data) => data.label, run);
    const showLinks = keyed(list, (data) => data.id, link);
    const showSections = keyed(place("page"), (data) => data.id, section);

    return (page) => {
      for (const data of page.sections) state.sections.set(data.id, data);
      document.title = `${page.title} · omni-async`;
      place("made").textContent = `omni-async ${page.version}, ${page.made}`;
      showRuns(page.runs);
      const sections = [...state.sections.values()];
      axes.element.classList.toggle("hidden", !sections.some(hasAxes));
      showLinks(sections);
      showSections(sections);
      omniAsync.charts.appear();
      if (first && location.hash.length > 1) open(location.hash.slice(1));
      first = false;
    };
  }

  let show = null;

  /** Draw a new page. */
  function render(page) {
    show = create();
    show(page);
  }

  /** Draw changes; sections that `page` lacks remain. */
  function update(page) {
    if (show === null) render(page);
    else show(page);
  }

  return { render, update };
})();
