// Keeps a page live: news arrive as server-sent events, the timeline is requested in windows, and buttons change the
// run after a confirmation. The key for buttons is in the link, behind the `#`, and stays in this tab.

omniAsync.live = (() => {
  const { element } = omniAsync.elements;
  const KEY = "omni-async-key";
  const RETRY_MS = 5000;
  const LATE_MS = 5000;
  const GIVE_UP_MS = 30000; // twice the server's pause between beats
  const LOG_MS = 2000;

  const hash = location.hash.slice(1);
  if (/^[\w-]{40,}$/.test(hash)) {
    sessionStorage.setItem(KEY, hash);
    history.replaceState(null, "", location.pathname);
  }

  /** Return the JSON of an answer. Throws an error with one line for the reader if the request failed. */
  async function answered(response) {
    if (response.ok) return response.json();
    const { error } = await response.json().catch(() => ({ error: response.statusText }));
    throw new Error(error);
  }

  /** Return the shares of a window, which are base64 of one byte each. */
  const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

  const source = {
    async window({ from, to, first, last, columns }) {
      const query = new URLSearchParams({ from, to, first, last, columns });
      const came = await answered(await fetch(`api/window?${query}`));
      return came.busy === undefined ? came : { ...came, boxes: null, busy: bytes(came.busy), waits: bytes(came.waits) };
    },
    group: async (number) => answered(await fetch(`api/group/${number}`)),
  };

  // ---- elements of live pages only ----------------------------------------------------------------------------------

  function card(...children) {
    const [title, hint] = [element("h3"), element("p", { className: "hint" })];
    const box = element("div", { className: "card" }, title, hint, ...children);
    return { box, head: (data) => { box.id = data.id; title.textContent = data.title; hint.textContent = data.hint ?? ""; } };
  }

  function meters() {
    const list = element("dl", { className: "meters" });
    const { box, head } = card(list);
    const item = ({ label, taken, of, text }) => {
      const meter = element("meter", { min: 0, max: of || Math.max(taken, 1), value: taken, "aria-label": `${label}: ${text}` });
      return element("div", {}, element("dt", {}, label), element("dd", {}, meter, element("span", {}, text)));
    };
    return { element: box, update(data) { head(data); list.replaceChildren(...data.items.map(item)); } };
  }

  function pictures() {
    const list = element("div", { className: "pictures" });
    const { box, head } = card(list);
    const item = ({ src, label }) => {
      const link = element("a", { href: src, target: "_blank", rel: "noopener" }, element("img", { src, alt: label, loading: "lazy" }));
      return element("figure", {}, link, element("figcaption", {}, label));
    };
    return { element: box, update(data) { head(data); list.replaceChildren(...data.items.map(item)); } };
  }

  /** Show a confirmation dialog; resolves to whether the reader confirmed. */
  function confirmed(question, yes) {
    const [go, no] = [element("button", { type: "submit", value: "yes", className: "danger" }, yes), element("button", { type: "submit", value: "no", autofocus: true }, "Cancel")];
    const dialog = element("dialog", { className: "confirm", "aria-label": yes }, element("p", {}, question),
      element("form", { method: "dialog" }, no, go));
    document.body.append(dialog);
    dialog.showModal();
    return new Promise((resolve) => dialog.addEventListener("close", () => {
      resolve(dialog.returnValue === "yes");
      dialog.remove();
    }));
  }

  async function act(asked) {
    const headers = { "Content-Type": "application/json", "X-Omni-Async-Key": sessionStorage.getItem(KEY) ?? "" };
    return answered(await fetch("api/act", { method: "POST", headers, body: JSON.stringify(asked) }));
  }

  function actions() {
    const [rows, said] = [element("div", { className: "scales" }), element("p", { className: "hint", role: "status" })];
    const stop = element("button", { type: "button", className: "danger" }, "Stop the run");
    const box = element("div", { className: "card", id: "actions" }, element("h3", {}, "Change the run"), rows, stop, said);
    const inputs = new Map();
    let data = null;

    async function ask(question, yes, asked) {
      if (!(await confirmed(question, yes))) return;
      said.textContent = `${yes}: asked`;
      try {
        const { result } = await act(asked);
        said.textContent = `${yes}: ${result}`;
      } catch (error) {
        said.textContent = `${yes}: ${error.message}`;
      }
    }

    stop.addEventListener("click", () => ask("Stop the run as Ctrl-C would? It leaves a checkpoint and can be resumed.", "Stop", { action: "stop" }));

    function row(role) {
      const input = element("input", { type: "number", min: 1, max: 100000, step: 1, id: `scale-${role}`, required: true });
      const form = element("form", {}, element("label", { htmlFor: input.id }, `Workers of ${role}`), input, element("button", { type: "submit" }, "Scale"));
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        const count = Number(input.value);
        ask(`Scale ${role} from ${data.roles[role]} to ${count}?`, `Scale ${role}=${count}`, { action: "scale", workers: { [role]: count } });
      });
      inputs.set(role, { form, input, count: "" });
      rows.append(form);
    }

    return {
      element: box,
      update(changed) {
        data = changed;
        const keyed = Boolean(sessionStorage.getItem(KEY));
        for (const [role, count] of Object.entries(data.roles)) {
          if (!inputs.has(role)) row(role);
          const held = inputs.get(role);
          // Keep a number that the reader has typed and not sent.
          const isOwn = held.input.value !== String(held.count);
          if (!isOwn && document.activeElement !== held.input) held.input.value = count;
          if (!isOwn || held.input.value === String(count)) held.count = held.input.value;
        }
        for (const [role, { form }] of inputs) form.classList.toggle("hidden", !(role in data.roles));
        for (const button of box.querySelectorAll("button")) button.disabled = !(data.running && keyed);
        if (data.doing) said.textContent = `The run: ${data.doing}`;
        else if (!data.running) said.textContent = "The run does not answer: there is nothing to change.";
        else if (!keyed) said.textContent = "To change the run, open the link that `omni-async watch` printed.";
        else if (said.textContent.startsWith("The run")) said.textContent = "";
      },
    };
  }

  /** Show the last lines of the chosen worker's log, asked for again while the card is open. */
  function logs() {
    const [pick, text] = [element("select", { id: "log-of" }), element("pre", { className: "log", tabIndex: 0, role: "log", "aria-label": "Lines of the log" })];
    const details = element("details", {}, element("summary", {}, "Show"), element("label", { htmlFor: pick.id }, "Worker "), pick, text);
    const { box, head } = card(details);
    box.classList.add("wide");

    async function refresh() {
      if (!details.open || !pick.value) return;
      const key = sessionStorage.getItem(KEY);
      if (!key) {
        text.textContent = "To read logs, open the link that `omni-async watch` printed.";
        return;
      }
      try {
        const headers = { "X-Omni-Async-Key": key };
        const lines = await answered(await fetch(`api/log/${encodeURIComponent(pick.value)}`, { headers }));
        const isAtEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 20;
        text.textContent = lines.join("\n");
        if (isAtEnd) text.scrollTop = text.scrollHeight;
      } catch (error) {
        text.textContent = error.message;
      }
    }

    setInterval(refresh, LOG_MS);
    details.addEventListener("toggle", refresh);
    pick.addEventListener("change", refresh);
    return {
      element: box,
      update(data) {
        head(data);
        const chosen = pick.value;
        pick.replaceChildren(...data.workers.map((worker) => element("option", { value: worker }, worker)));
        if (data.workers.includes(chosen)) pick.value = chosen;
      },
    };
  }

  Object.assign(omniAsync.tables, { meters, pictures, actions, logs });

  // ---- news ---------------------------------------------------------------------------------------------------------

  const state = element("span", { id: "connection", className: "hint", role: "status" });
  const loading = document.getElementById("loading"); // until the first message
  const first = loading.textContent;
  let [page, report, asking] = [null, -1, false];

  /** Show the state of the connection: on the empty page, too. */
  function say(text) {
    state.textContent = text;
    loading.textContent = `${first} ${text}`;
  }

  async function refresh(wanted) {
    if (asking || wanted === report || wanted < 0) return;
    asking = true;
    try {
      const sections = await answered(await fetch("api/report"));
      if (sections) omniAsync.page.update({ ...page, sections });
      report = wanted;
      state.textContent = "live";
    } catch {
      state.textContent = "The report's sections did not come; they are asked for again.";
    } finally {
      asking = false;
    }
  }

  /** Reconnect: a browser gives up if too many pages are open, or if a restarted server requires the token. */
  async function again() {
    const { status } = await fetch("api/group/0").catch(() => ({}));
    if (status === 401) location.reload();
    else start();
  }

  function start() {
    document.getElementById("runs").after(state);
    const news = new EventSource("events");
    // A browser waits for the first answer for ever.
    const late = page === null ? setTimeout(() => say(`The server has not answered for ${LATE_MS / 1000} s; the page keeps trying.`), LATE_MS) : null;
    const afresh = page === null ? setTimeout(() => { news.close(); start(); }, GIVE_UP_MS) : null;
    news.addEventListener("open", () => {
      clearTimeout(afresh);
      state.textContent = "live";
      report = -1; // a restarted server counts from the start
    });
    news.addEventListener("error", () => {
      say("Not connected: the page keeps trying.");
      if (news.readyState !== EventSource.CLOSED) return;
      clearTimeout(late);
      clearTimeout(afresh);
      setTimeout(again, RETRY_MS);
    });
    news.addEventListener("message", (event) => {
      clearTimeout(late);
      const came = JSON.parse(event.data);
      page = came.page;
      omniAsync.page.update(page);
      refresh(came.report);
    });
  }

  return { source, start };
})();

omniAsync.live.start();
