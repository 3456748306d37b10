// The review page with scripts: single keys, a lease that is renewed while someone works, and the next question by itself.

const item = document.getElementById("item"), begin = document.getElementById("begin"), lost = document.getElementById("lost");
const away = document.getElementById("away"), single = document.getElementById("single-keys");
single.checked = localStorage.getItem("single keys") !== "off";
single.addEventListener("change", () => localStorage.setItem("single keys", single.checked ? "on" : "off"));

let acted = Date.now(), active = 0, since = Date.now(), sent = false;
const act = () => { const now = Date.now(); if (now - acted < 120000) active += now - Math.max(acted, since); acted = now; since = now; };
for (const kind of ["keydown", "pointerdown", "pointermove", "wheel"]) addEventListener(kind, act, { passive: true });

const post = (path) => fetch(path, {
  method: "POST", headers: { "X-CSRF-Token": item.dataset.csrf }, body: new URLSearchParams({ token: item.dataset.token }),
});

if (item) {
  const buttons = (value) => item.querySelector(`button[value=${value}]`);
  item.addEventListener("submit", (event) => {
    if (sent) { event.preventDefault(); return; }  // a double Enter is one vote
    sent = true;
    act();
    item.elements.active.value = (active / 1000).toFixed(1);
  });
  setInterval(async () => {
    if (document.hidden || sent || Date.now() - acted > 120000) return;
    try {
      const reply = await post("/console/review/renew");
      if (reply.status === 409) lost.hidden = false;
      away.hidden = reply.status < 500;
    } catch { away.hidden = false; }  // the next turn tries again
  }, 30000);
  addEventListener("pagehide", () => {
    if (sent) return;
    const form = new URLSearchParams({ token: item.dataset.token, csrf: item.dataset.csrf });
    navigator.sendBeacon("/console/review/return", form);
  });
  const narrow = item.querySelector("input.narrow");
  if (narrow) {
    narrow.hidden = false;
    narrow.addEventListener("input", () => {
      const wanted = narrow.value.toLowerCase();
      for (const option of item.querySelectorAll(".option")) option.hidden = !option.textContent.toLowerCase().includes(wanted);
    });
    narrow.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      item.querySelector(".option:not([hidden]) input")?.focus();
    });
  }
  item.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.target.matches("button, input[type=search]")) return;
    event.preventDefault();
    item.requestSubmit(buttons("vote"));
  });
}

addEventListener("keydown", (event) => {
  const target = event.target, typing = target.matches?.("input:not([type=radio]):not([type=checkbox]), textarea, select");
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || typing || document.querySelector("dialog[open]")) return;
  if (event.key === "Enter" && !target.closest?.("form, button, a, dialog")) {
    if (begin) begin.querySelector("button")?.click();
    else if (item) item.requestSubmit(item.querySelector("button[value=vote]"));
    return;
  }
  if (!single.checked) return;
  const radio = item?.querySelector(`input[data-digit="${CSS.escape(event.key)}"]`);
  if (radio) { radio.checked = true; radio.focus(); event.preventDefault(); return; }
  const control = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
  if (control) { event.preventDefault(); control.matches("input") ? control.focus() : control.click(); }
});

// A question that arrives is fetched by itself only while someone is there to take it.
document.addEventListener("changed", (event) => {
  if (event.detail !== "queue" || !begin || !("waiting" in begin.dataset) || !event.places) return;
  if (Date.now() - acted < 60000) begin.requestSubmit(begin.querySelector("button"));
  else begin.querySelector(".lead").textContent = "A question has arrived: press Enter.";
});
