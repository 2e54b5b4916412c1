// Describes a group's way through a run in words: prompt, denoising steps with their versions, media, scores, update.

omniAsync.way = (() => {
  const { element } = omniAsync.elements;
  const plural = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
  const at = (time) => `${Number(time.toFixed(2))} s`;
  const size = (bytes) => (bytes >= 2 ** 20 ? `${(bytes / 2 ** 20).toFixed(1)} MiB` : `${Math.ceil(bytes / 1024)} KiB`);

  /** Describe the versions of a sample's denoising steps: "6 steps by version 20, 4 by 21". */
  function steps(args) {
    if (!Array.isArray(args.version_steps)) return args.versions ? `versions ${args.versions}` : "versions unknown";
    return args.version_steps.map(([version, count], i) => (i ? `${count} by ${version}` : `${plural(count, "step")} by version ${version}`)).join(", ");
  }

  function stage(name, ...children) {
    return element("li", {}, element("strong", {}, name), ...children);
  }

  const line = (text) => element("p", {}, text);

  function drawn(spans, lanes) {
    if (!spans.length) return stage("Denoising", line("No sample of it is in the timeline here."));
    const engines = [...new Set(spans.map((span) => lanes[span.lane]))];
    const [begin, end] = [Math.min(...spans.map((span) => span.start)), Math.max(...spans.map((span) => span.end))];
    const alike = new Map();
    for (const span of spans) alike.set(steps(span.args), [...(alike.get(steps(span.args)) ?? []), span]);
    const name = (span) => String(span.args.sample ?? "").split(".").pop() || "sample";
    const samples = [...alike].map(([text, own]) => element("li", {}, `${own.map(name).join(", ")}: ${text}`));
    return stage("Denoising", line(`${plural(spans.length, "sample")} by ${engines.join(", ")}, ${at(begin)} to ${at(end)}`),
      element("ul", { className: "way-samples" }, ...samples));
  }

  function media(spans, found) {
    const bytes = spans.reduce((sum, span) => sum + (span.args.media_bytes ?? 0), 0);
    const alt = `a sample of update ${found.entry?.trained_version}`;
    const pictures = found.media.map((one) => (one.src ? element("img", { src: one.src, alt, loading: "lazy" }) : element("p", {}, one.text || "(no text)")));
    const text = bytes ? `${size(bytes)} of media` : spans.length ? `${plural(spans.length, "sample")} with media` : "none here";
    const more = pictures.length ? line("Samples of its prompt that the update showed:") : null;
    return stage("Media", line(text), more, element("div", { className: "way-media" }, ...pictures));
  }

  function scored(calls, entry, lanes) {
    const reward = entry?.reward === null || entry?.reward === undefined ? "" : `Mean reward ${Number(entry.reward.toPrecision(4))}. `;
    const each = calls.map((span) => `${span.args.scorer ?? "scorer"} on ${lanes[span.lane]} at ${at(span.start)}, ${at(span.end - span.start)}, ${plural(span.args.samples ?? 1, "sample")}`);
    const missing = entry?.left_out?.length ? ` Without ${entry.left_out.join(", ")}, which failed.` : "";
    const many = calls.length ? `${plural(calls.length, "call")} of scorers with its prompt.` : "No call with its prompt is in the timeline here.";
    const shown = each.length > 9 ? [...each.slice(0, 8), `and ${each.length - 8} more`] : each;
    return stage("Scores", line(`${reward}${many}${missing}`),
      element("ul", { className: "way-samples" }, ...shown.map((text) => element("li", {}, text))));
  }

  function ended(found, trained, lanes) {
    const { entry } = found;
    if (!entry) return stage("Update", line("It has not ended: it is being drawn, scored, or waits to be trained."));
    if (entry.event !== "trained") return stage("Update", line(`${entry.event}: ${entry.reason}.`));
    const [first, last] = [trained[0], trained[trained.length - 1]];
    const [oldest, newest] = entry.step_versions ?? [];
    const drawers = oldest === newest ? `version ${oldest ?? "unknown"}` : `versions ${oldest} to ${newest}`;
    const when = first ? ` on ${lanes[first.lane]}, ${at(first.start)} to ${at(last.end)}` : "";
    return stage("Update", line(`Trained in update ${entry.trained_version}${when}.`),
      line(`Admitted at version ${entry.admitted_version}, staleness ${plural(entry.staleness, "update")}, trained steps drawn by ${drawers}.`));
  }

  /** Show a group in `panel`; `close` is called when the reader closes it. */
  function show(panel, found, lanes, close) {
    const of = (...kinds) => found.spans.filter((span) => kinds.includes(span.kind));
    const shut = element("button", { type: "button", "aria-label": "Close" }, "×");
    shut.addEventListener("click", close);
    const prompt = found.prompt ?? "Its text is not here: the prompt file is elsewhere, or was not read.";
    const raw = found.entry ? element("details", {}, element("summary", {}, "Its line in the ledger"), element("pre", {}, JSON.stringify(found.entry, null, 1))) : null;
    panel.replaceChildren(
      element("div", { className: "way-head" }, element("h4", {}, `Group ${found.group}`), shut),
      element("ol", {},
        stage(`Prompt${found.entry ? ` ${found.entry.prompt}` : ""}`, element("p", { className: "way-prompt" }, prompt)),
        drawn(of("generate", "read"), lanes), media(of("generate", "read"), found), scored(of("score"), found.entry, lanes),
        ended(found, of("train", "proximal"), lanes)),
      ...(raw ? [raw] : []));
    panel.classList.remove("hidden");
    panel.focus({ preventScroll: true });
  }

  return { show };
})();
