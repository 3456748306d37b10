// What pages do with scripts: fetch parts again that have changed, and move the cursor of a chart.
// Text is only ever text: nothing here turns a string into markup.

const root = document.documentElement;
const POLL = { "X-Poll": "1" };  // what no person asked for must not keep them signed in

class LivePart extends HTMLElement {
  busy() {
    return this.contains(document.activeElement) && document.activeElement !== this || this.querySelector("details[open], dialog[open]");
  }
  refresh() {
    if (this.busy()) { this.stale = true; return; }
    const wait = (this.next ?? 0) - Date.now();
    if (wait > 0) { this.timer ??= setTimeout(() => { this.timer = undefined; this.refresh(); }, wait); return; }
    this.next = Date.now() + 2000;
    const index = [...document.querySelectorAll("live-part")].indexOf(this);
    const request = new XMLHttpRequest();
    request.open("GET", location.href);
    request.responseType = "document";
    request.setRequestHeader("X-Poll", POLL["X-Poll"]);
    request.onload = () => {
      const page = request.response, part = page?.querySelectorAll("live-part")[index];
      if (request.status !== 200 || !part || this.busy()) return;
      this.stale = false;
      this.replaceChildren(...document.adoptNode(part).childNodes);
    };
    request.send();
  }
  connectedCallback() {
    this.addEventListener("focusout", () => setTimeout(() => this.stale && this.refresh(), 200));
  }
}
customElements.define("live-part", LivePart);

class ChartCursor extends HTMLElement {
  connectedCallback() {
    const points = JSON.parse(this.dataset.points), input = this.querySelector("input"), figure = this.closest("figure");
    const output = figure.querySelector("output"), lines = [...figure.querySelectorAll("svg")];
    const show = (cursor) => {
      const [share, text] = points[input.value];
      output.textContent = text;
      input.setAttribute("aria-valuetext", text);
      for (const svg of lines) {
        const line = svg.querySelector(".cursor");
        line.setAttribute("transform", `translate(${Number(svg.dataset.left) + share * svg.dataset.span} 0)`);
        line.classList.toggle("on", cursor);
      }
    };
    input.hidden = false;
    input.addEventListener("input", () => show(true));
    show(false);
    for (const svg of lines) svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const share = ((event.clientX - box.left) * scale - svg.dataset.left) / svg.dataset.span;
      let nearest = 0;
      points.forEach(([x], k) => { if (Math.abs(x - share) < Math.abs(points[nearest][0] - share)) nearest = k; });
      input.value = nearest;
      show(true);
    });
  }
}
customElements.define("chart-cursor", ChartCursor);

// Every two seconds, while the tab is visible, ask whether anything has changed.
const KINDS = ["policies", "figures", "queue"];
let seen = root.dataset.since?.split("-");
const look = (kind) => {
  for (const part of document.querySelectorAll("live-part")) {
    if (!part.getAttribute("name").split(" ").includes(kind)) continue;
    part.refresh();
    clearTimeout(part.again);
    part.again = setTimeout(() => part.refresh(), 8000);  // counts and courses follow within seconds
  }
  document.dispatchEvent(Object.assign(new CustomEvent("changed", { detail: kind }), { places: Number(seen[2]) }));
};
const poll = async () => {
  const reply = await fetch("/console/changes", { headers: POLL });
  if (reply.redirected) location.assign(reply.url);  // signed out
  if (reply.redirected || reply.status !== 200) return;
  const before = seen;
  seen = (await reply.text()).split("-");
  KINDS.forEach((kind, k) => seen[k] !== before[k] && look(kind));
};
const watch = async () => {
  try { if (!document.hidden) await poll(); } catch { }  // the gateway is away; the next turn asks again
  setTimeout(watch, 2000);
};
if (seen?.length === KINDS.length) setTimeout(watch, 2000);

// A file is read into the field beside it, which is what the form sends.
for (const input of document.querySelectorAll("input[type=file][data-into]")) {
  input.closest("[hidden]")?.removeAttribute("hidden");
  input.addEventListener("change", async () => {
    const file = input.files[0];
    if (file) document.getElementById(input.dataset.into).value = await file.text();
  });
}
