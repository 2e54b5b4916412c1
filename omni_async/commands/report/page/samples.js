// Shows samples over time: the same prompt and noise before training and at the round that the slider chooses.

omniAsync.samples = (() => {
  const { element } = omniAsync.elements;
  const FIRST = 4; // samples until the reader asks for all
  const numbers = new Intl.NumberFormat("en", { maximumFractionDigits: 3 });

  function media(frame, prompt) {
    const age = frame.version === 0 ? "before training" : `update ${frame.version}`;
    const reward = frame.reward === null ? "" : ` · ${Math.abs(frame.reward) < 10 ? frame.reward.toFixed(2) : numbers.format(frame.reward)}`;
    const alt = `${prompt}, ${age}`;
    const label = element("span", { className: "age" }, `${frame.version === 0 ? "before" : `at ${frame.version}`}${reward}`);
    if (frame.medium === "text") return element("div", {}, element("p", { className: "text" }, frame.text || "(no text)"), label);
    if (!frame.src) return element("div", {}, element("p", { className: "none" }, `no medium of ${age}`));
    if (frame.medium === "image") return element("div", {}, element("img", { src: frame.src, alt }), label);
    const playing = { src: frame.src, controls: true, loop: true, "aria-label": alt };
    if (frame.medium === "video") return element("div", {}, element("video", { ...playing, muted: true, playsInline: true }), label);
    return element("div", {}, element("audio", playing), label);
  }

  function strip(data, position, paired) {
    const frames = paired && position > 0 ? [data.frames[0], data.frames[position]] : [data.frames[position]];
    if (paired && frames.length === 1) frames.push(frames[0]);
    const target = data.target ? element("span", { className: "target" }, ` → ${data.target}`) : null;
    const pair = element("div", { className: "pair" }, ...frames.map((frame) => media(frame, data.prompt)));
    const question = data.question ? element("img", { className: "question", src: data.question, alt: `image of the prompt: ${data.prompt}` }) : null;
    return element("li", {}, element("figure", { className: "strip" }, question, pair, element("figcaption", {}, data.prompt, target)));
  }

  /** Return the view of a block of samples. */
  function draw() {
    const slider = element("input", { type: "range", min: 0, step: 1, "aria-label": "Round to show" });
    const said = element("output");
    const play = element("button", { type: "button" }, "Play");
    const strips = element("ul", { className: "strips" });
    const more = element("button", { type: "button", className: "more" });
    const note = element("p", { className: "note" });
    const player = element("div", { className: "player" }, play, slider, said);
    const box = element("div", { className: "card wide samples" }, strips, player, more, note);
    let [data, timer, all] = [null, null, false];

    function show() {
      const position = Number(slider.value);
      const [version, value] = [data.versions[position], data.values[position]];
      const when = version === 0 ? "before training" : `after update ${version}`;
      const text = value === null ? when : `${when}: reward ${numbers.format(value)}${data.over[position]}`;
      said.textContent = text;
      slider.setAttribute("aria-valuetext", text);
      const shown = all ? data.strips : data.strips.slice(0, FIRST);
      strips.replaceChildren(...shown.map((one) => strip(one, position, data.paired)));
      more.textContent = all ? "Show fewer samples" : `Show all ${data.strips.length} samples`;
      more.classList.toggle("hidden", data.strips.length <= FIRST);
    }

    function stop() {
      clearInterval(timer);
      timer = null;
      play.textContent = "Play";
    }

    function step() {
      const last = Number(slider.max);
      slider.value = Number(slider.value) >= last ? 0 : Number(slider.value) + 1;
      show();
      if (Number(slider.value) === last) stop();
    }

    more.addEventListener("click", () => {
      all = !all;
      show();
    });
    slider.addEventListener("input", () => {
      stop();
      show();
    });
    play.addEventListener("click", () => {
      if (timer) return stop();
      if (Number(slider.value) === Number(slider.max)) slider.value = 0;
      show();
      play.textContent = "Pause";
      timer = setInterval(step, 900);
    });

    function update(changed) {
      const newest = data === null || Number(slider.value) === Number(slider.max);
      data = changed;
      box.id = `samples-${data.id}`;
      slider.max = data.versions.length - 1;
      if (newest) slider.value = slider.max;
      strips.classList.toggle("single", !data.paired);
      strips.classList.toggle("pixelated", data.pixelated);
      player.classList.toggle("hidden", data.versions.length < 2);
      note.textContent = data.note;
      note.classList.toggle("hidden", !data.note);
      show();
    }

    return { element: box, update, dispose: stop };
  }

  return { draw };
})();
