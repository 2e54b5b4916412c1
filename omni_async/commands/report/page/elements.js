// Makes elements, and keeps lists of them in step with data. Text stays text: no content of a run becomes markup.

globalThis.omniAsync = {};

omniAsync.elements = (() => {
  /** Return an element with these properties, attributes (`aria-...`, `role`) and children, texts among them. */
  function element(tag, properties = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (value === undefined || value === null) continue;
      if (name in made && !name.includes("-")) made[name] = value;
      else made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }

  /**
   * Return a function that makes `parent` show a list: a view `{element, update, dispose}` per item, made once per key
   * and updated only if its item changed, so that the reader's open, chosen or focused elements keep their state.
   */
  function keyed(parent, keyOf, make) {
    let views = new Map();
    return (items) => {
      const next = new Map();
      items.forEach((item, position) => {
        const key = keyOf(item, position);
        const text = JSON.stringify(item);
        const held = views.get(key) ?? { view: make(item), text: null };
        if (held.text !== text) held.view.update(item);
        next.set(key, { ...held, text });
      });
      for (const [key, { view }] of views) {
        if (next.has(key)) continue;
        view.dispose?.();
        view.element.remove();
      }
      [...next.values()].forEach(({ view }, position) => {
        const there = parent.children[position] ?? null;
        if (there !== view.element) parent.insertBefore(view.element, there);
      });
      views = next;
    };
  }

  let groups = 0;

  /** Return a choice of one of several: `{element, update(items)}` with items `{value, label}`. */
  function choice(legend, onChoose) {
    const name = `choice-${(groups += 1)}`;
    const box = element("fieldset", { className: "choice" }, element("legend", {}, legend));
    let chosen = null;
    function update(items) {
      if (!items.some((item) => item.value === chosen)) chosen = items[0]?.value ?? null;
      box.replaceChildren(box.firstElementChild);
      for (const { value, label } of items) {
        const id = `${name}-${value}`;
        const input = element("input", { type: "radio", name, id, checked: value === chosen });
        input.addEventListener("change", () => onChoose((chosen = value)));
        box.append(input, element("label", { htmlFor: id }, label));
      }
      box.classList.toggle("hidden", items.length < 2);
    }
    return { element: box, update };
  }

  return { element, keyed, choice };
})();
