// What pages do with scripts: look again when the gateway says so, and move the cursor of a chart.
// Text is only ever text: nothing here turns a string into markup.

const root = document.documentElement;

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

// One stream for a page, closed while its tab is hidden: a browser has six connections to a host.
let stream, seen = root.dataset.since, polling;
const look = (kind) => {
  for (const part of document.querySelectorAll("live-part")) {
    if (!part.getAttribute("name").split(" ").includes(kind)) continue;
    part.refresh();
    clearTimeout(part.again);
    part.again = setTimeout(() => part.refresh(), 8000);  // counts and courses follow within seconds
  }
  document.dispatchEvent(Object.assign(new CustomEvent("news", { detail: kind }), { places: Number(seen.split("-")[2]) }));
};
const listen = () => {
  if (!seen || stream || document.hidden) return;
  stream = new EventSource(`/console/events?since=${encodeURIComponent(seen)}`);
  for (const kind of ["policies", "figures", "queue"]) stream.addEventListener(kind, (event) => { seen = event.lastEventId; look(kind); });
  stream.addEventListener("error", () => {
    if (stream?.readyState !== EventSource.CLOSED) return;
    stream = undefined;
    polling ??= setInterval(() => document.hidden || ["policies", "figures", "queue"].forEach(look), 15000);
  });
};
const close = () => { stream?.close(); stream = undefined; };
document.addEventListener("visibilitychange", () => document.hidden ? close() : listen());
addEventListener("pagehide", close);
addEventListener("pageshow", (event) => event.persisted && listen());
listen();

// A file is read into the field beside it, which is what the form sends.
for (const input of document.querySelectorAll("input[type=file][data-into]")) {
  input.closest("[hidden]")?.removeAttribute("hidden");
  input.addEventListener("change", async () => {
    const file = input.files[0];
    if (file) document.getElementById(input.dataset.into).value = await file.text();
  });
}
