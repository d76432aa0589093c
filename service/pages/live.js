// Keeps a page up with its run: the parts of it that change are fetched anew, rendered by the server
// as they were at first. Told when by server-sent events; where they fail, by asking now and then.

const PAUSE = 1500; // milliseconds between two renewals
const POLL = 5000;

// Makes `old` like `fresh`, touching only what differs: rows keep their focus and their place.
export function morph(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  for (const name of new Set([...old.getAttributeNames(), ...fresh.getAttributeNames()])) {
    if (fresh.hasAttribute(name)) {
      if (old.getAttribute(name) !== fresh.getAttribute(name)) old.setAttribute(name, fresh.getAttribute(name));
    } else if (name !== "open" && name !== "hidden") old.removeAttribute(name); // what a reader opened stays open
  }
  if (old.children.length === 0 && fresh.children.length === 0) {
    if (old.textContent !== fresh.textContent) old.textContent = fresh.textContent;
    return;
  }
  const keyed = new Map([...old.children].filter((child) => child.id).map((child) => [child.id, child]));
  if (keyed.size) {
    const children = [...fresh.children].map((child) => {
      const known = keyed.get(child.id);
      if (!known) return child;
      morph(known, child);
      return known;
    });
    const same = children.length === old.children.length && children.every((child) => child.parentNode === old);
    if (!same) old.replaceChildren(...children);
    return;
  }
  const alike = old.childNodes.length === fresh.childNodes.length && [...old.childNodes].every((child, i) => child.nodeName === fresh.childNodes[i].nodeName);
  if (!alike) {
    if (!old.contains(document.activeElement)) old.replaceChildren(...fresh.childNodes);
    return;
  }
  [...old.childNodes].forEach((child, i) => {
    const other = fresh.childNodes[i];
    if (child.nodeType === Node.ELEMENT_NODE) morph(child, other);
    else if (child.nodeValue !== other.nodeValue) child.nodeValue = other.nodeValue;
  });
}

export class Live {
  // `events`: address of the run's events, or ""; `poll`: seconds, or 0; `renewed`, `grown`: called back.
  constructor({ events, poll, renewed, grown }) {
    Object.assign(this, { events, poll, renewed, grown, stale: document.getElementById("stale") });
    if (!events && !poll) return;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start(true)));
    this.start(false);
  }

  // A hidden page holds no connection: a browser has six of them for all its pages together.
  start(missed) {
    if (missed) this.happened();
    if (this.events) this.listen();
    else if (this.poll) this.timer = setInterval(() => this.happened(), this.poll * 1000);
  }

  stop() {
    this.source?.close();
    clearInterval(this.timer);
  }

  listen() {
    clearInterval(this.timer);
    this.source?.close();
    const source = (this.source = new EventSource(this.events));
    source.addEventListener("progress", () => this.renewSoon());
    source.addEventListener("data", () => this.grown());
    source.addEventListener("end", () => {
      this.events = "";
      source.close();
      this.happened();
    });
    source.addEventListener("error", () => {
      if (source.readyState !== EventSource.CLOSED) return; // it tries again by itself
      this.timer = setInterval(() => this.happened(), POLL);
    });
  }

  happened() {
    this.renewSoon();
    this.grown();
  }

  renewSoon() {
    if (this.waiting) return;
    const wait = Math.max(0, (this.last ?? 0) + PAUSE - performance.now());
    this.waiting = setTimeout(() => {
      this.waiting = undefined;
      this.last = performance.now();
      this.renew();
    }, wait);
  }

  async renew() {
    try {
      const answer = await fetch(location.href, { headers: { accept: "text/html" } });
      if (!answer.ok) throw new Error(answer.status === 401 ? "the token is no longer good" : `the service answered ${answer.status}`);
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const old of document.querySelectorAll("[data-morph]")) {
        const other = fresh.getElementById(old.id);
        if (other) morph(old, other);
      }
      this.stale.hidden = true;
      this.renewed(fresh);
    } catch (error) {
      this.stale.textContent = `Not up to date: ${error instanceof TypeError ? "the service doesn't answer" : error.message}. Trying again.`;
      this.stale.hidden = false;
      setTimeout(() => this.renewSoon(), POLL);
    }
  }
}
