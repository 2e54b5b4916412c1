// Lists the runs of a folder, with links to their pages. The key for buttons is in the link, behind the `#`, and stays
// in this tab.

(() => {
  const { element } = omniAsync.elements;
  const PAUSE_MS = 5000;
  const LATE_MS = 5000;
  const LONGEST_MS = 60000; // a folder of thousands of runs takes a while
  const hash = location.hash.slice(1);
  if (/^[\w-]{40,}$/.test(hash)) {
    sessionStorage.setItem("omni-async-key", hash);
    history.replaceState(null, "", location.pathname);
  }

  const number = (value) => element("td", {}, value === null ? "" : value.toFixed(3));
  const head = ["run", "status", "update", "reward", "validation", "began"].map((text) => element("th", { scope: "col" }, text));

  function row(run) {
    const name = /^[\w.-]{1,200}$/.test(run.run) ? element("a", { href: `${run.run}/` }, run.run) : run.run;
    const pill = element("span", { className: `pill ${run.status}` }, run.status);
    const began = new Date(run.began * 1000).toLocaleString();
    const status = element("td", {}, pill, run.emulated ? " emulated" : null);
    return element("tr", {}, element("td", {}, name), status, element("td", {}, String(run.update)),
      number(run.reward), number(run.validation), element("td", {}, began));
  }

  async function show() {
    const said = document.getElementById("said");
    const late = setTimeout(() => {
      said.textContent = `The server has not answered for ${LATE_MS / 1000} s; the page keeps trying.`;
    }, LATE_MS);
    try {
      const response = await fetch("api/runs", { signal: AbortSignal.timeout(LONGEST_MS) });
      const runs = await response.json();
      if (!response.ok) throw new Error(runs.error);
      document.getElementById("list").replaceChildren(element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...runs.map(row)));
      said.textContent = runs.length ? "" : "There is no run yet.";
    } catch (error) {
      said.textContent = `Not connected: ${error.message}. The page keeps trying.`;
    } finally {
      clearTimeout(late);
    }
    setTimeout(show, PAUSE_MS);
  }

  show();
})();
