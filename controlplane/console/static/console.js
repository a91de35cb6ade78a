// What pages do by themselves, where scripts run; every page works without. No page depends on another site.
"use strict";

// Filters of tables: shown only here, because they are of no use without a script.
for (const label of document.querySelectorAll("label[data-filter]")) {
  const input = label.querySelector("input");
  label.hidden = false;
  input.addEventListener("input", () => {
    const wanted = input.value.trim().toLowerCase();
    const table = document.getElementById(label.dataset.filter);
    for (const row of table.tBodies[0].rows) {
      row.hidden = wanted !== "" && !row.textContent.toLowerCase().includes(wanted);
    }
  });
}

for (const button of document.querySelectorAll("button[data-copy]")) {
  if (!navigator.clipboard) continue;
  button.hidden = false;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).value);
    button.textContent = "Copied";
  });
}

// A form is sent once; the services would do its work once anyway.
for (const form of document.querySelectorAll("form[method=post]")) {
  form.addEventListener("submit", () => {
    for (const button of form.querySelectorAll("button")) button.setAttribute("aria-disabled", "true");
    form.classList.add("sent");
  });
}

// Pages that show what goes on are read again now and then, unless somebody uses them or has stopped it. Such a request
// does not keep the session alive.
const main = document.querySelector("main[data-refresh]");
if (main) {
  const every = Number(main.dataset.refresh) * 1000;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet refresh";
  let isPaused = sessionStorage.getItem("saltern-paused") === "yes";
  const tell = () => {
    button.textContent = isPaused ? "Refresh: off" : `Refresh: every ${every / 1000} s`;
    button.setAttribute("aria-pressed", String(!isPaused));
  };
  button.addEventListener("click", () => {
    isPaused = !isPaused;
    sessionStorage.setItem("saltern-paused", isPaused ? "yes" : "no");
    tell();
  });
  tell();
  document.querySelector("header.top .who").prepend(button);

  const isInUse = () =>
    main.contains(document.activeElement) && document.activeElement !== main ||
    main.querySelector("details[open]") !== null ||
    [...main.querySelectorAll("input[type=search]")].some((input) => input.value !== "") ||
    String(getSelection()) !== "";

  setInterval(async () => {
    if (isPaused || document.hidden || isInUse()) return;
    try {
      const answer = await fetch(location.href, { headers: { "saltern-refresh": "1" }, redirect: "follow" });
      if (answer.redirected) return location.reload();
      if (!answer.ok) return;
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
      if (fresh && !isInUse()) main.replaceChildren(...fresh.childNodes);
    } catch {
      button.textContent = "Refresh: no answer";
    }
  }, every);
}
