(function () {
  "use strict";
  // Without this script the page reads the same: it sorts, filters, unpacks the rows that are too many to write out, and opens details.
  var SHOWN = 100, MORE = 400;
  function get(id) { return document.getElementById(id); }
  function list(found) { return Array.prototype.slice.call(found); }
  var table = get("all"), body = table.tBodies[0], template = document.createElement("template");
  var options = table.dataset.options, byPlace = {}, byCell = {}, rows = [], order = [], limit = SHOWN, pinned = null, by = null, up = false;

  // ---- a row: its markup, and what it is sorted and found by ----

  function plain(html) {
    return html.replace(/<br>/g, " ").replace(/<[^>]*>/g, "").replace(/&#34;|&quot;/g, '"').replace(/&#39;/g, "'").replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
  }
  function add(html) {
    var head = /^<tr id="v(\d+)" data-state="([^"]*)" data-mode="([^"]*)" data-phase="([^"]*)" data-layer="([^"]*)"/.exec(html);
    if (!head) { return; }
    var row = { html: html, place: +head[1], state: head[2], mode: plain(head[3]), phase: plain(head[4]), layer: head[5] };
    byPlace[row.place] = row; rows.push(row);
  }
  function cells(row) { return row.cells || (row.cells = row.html.split("<td").slice(1).map(function (c) { return c.slice(c.indexOf(">") + 1); })); }
  function first(row, column) { return plain(cells(row)[column].split("<br>")[0]).trim(); }
  function kind(row) { var found = /href="#(g\d+)"/.exec(cells(row)[2]); return found ? get(found[1]) : null; }
  function reason(row) {
    var at = kind(row);
    return at ? { why: at.querySelector("[data-why]").textContent, reds: at.querySelector("[data-reds]").textContent } : null;
  }
  function text(row) {
    if (row.text === undefined) { var said = reason(row); row.text = (plain(row.html) + (said ? " " + said.why + " " + said.reds : "")).toLowerCase(); }
    return row.text;
  }
  var RANK = { fail: 3, "not run": 2, waived: 1, pass: 0 };
  function number(word) {
    if (word === "NaN") { return Infinity; }
    if (word === "inf") { return Number.MAX_VALUE; }
    if (word === "-inf") { return -Number.MAX_VALUE; }
    return parseFloat(word);
  }
  function key(row, column) {
    if (column === 0) { return RANK[row.state]; }
    if (column === 1) { return row.place; }
    if (column === 2) { return first(row, 2); }
    if (column === 5) { var s = /--s:([^"]*)"/.exec(row.html); return s ? parseFloat(s[1]) : NaN; }
    if (column === 7) { return Math.abs(number(first(row, 7)) - 1); }
    return number(first(row, column));
  }
  function made(row) {
    template.innerHTML = row.html;
    var tr = template.content.firstChild, said = reason(row), more = tr.querySelector("td.wide details"), code = tr.querySelector("code.id");
    if (code) { code.textContent = "pytest " + code.textContent + options; code.className = "cmd"; }
    if (said) {
      var line = document.createElement("div");
      line.className = "soft"; line.textContent = "why: " + said.why + " | turned red by: " + said.reds;
      more.insertBefore(line, code);
    }
    dress(tr);
    return tr;
  }

  // ---- the table ----

  var picks = ["state", "mode", "phase", "layer"].map(function (name) { return [name, get("f-" + name)]; });
  function choose() {
    var wanted = get("f-text").value.toLowerCase();
    order = rows.filter(function (row) {
      return picks.every(function (p) { return !p[1].value || row[p[0]] === p[1].value; }) && (!wanted || text(row).indexOf(wanted) >= 0);
    });
    if (by !== null) {
      var keyed = order.map(function (row, i) { return [key(row, by), i, row]; });
      keyed.sort(function (a, b) {
        var x = a[0], y = b[0], sign = up ? 1 : -1;
        if (x !== x || y !== y) { return (x !== x) - (y !== y) || a[1] - b[1]; }
        return x < y ? -sign : x > y ? sign : a[1] - b[1];
      });
      order = keyed.map(function (k) { return k[2]; });
    }
    limit = SHOWN; draw();
  }
  function draw() {
    var part = document.createDocumentFragment(), shown = order.slice(0, limit);
    if (pinned && shown.indexOf(pinned) < 0) { shown.unshift(pinned); }
    shown.forEach(function (row) { var tr = made(row); if (row === pinned) { tr.classList.add("hit"); tr.querySelector("td.wide details").open = true; } part.appendChild(tr); });
    body.textContent = ""; body.appendChild(part);
    get("f-count").textContent = "showing " + Math.min(limit, order.length) + " of " + order.length + (order.length < rows.length ? " that fit, of " + rows.length : "");
    get("f-more").hidden = limit >= order.length;
    get("f-more").textContent = "show " + Math.min(MORE, order.length - limit) + " more";
  }
  // On paper: every failure that fits the filters. What was not run is counted there by reason.
  function paper() {
    var all = order, was = limit;
    order = all.filter(function (row) { return row.state === "fail" || row.state === "waived"; }); limit = order.length; draw();
    order = all; limit = was;
  }
  function clear() { get("f-text").value = ""; picks.forEach(function (p) { p[1].value = ""; }); choose(); }
  function sortable() {
    list(table.tHead.rows[0].cells).forEach(function (th, column) {
      if ("plain" in th.dataset) { return; }
      var button = document.createElement("button");
      button.type = "button"; button.className = "sort";
      while (th.firstChild) { button.appendChild(th.firstChild); }
      th.appendChild(button); th.setAttribute("aria-sort", "none");
      button.addEventListener("click", function () {
        up = by === column ? !up : column === 1 || column === 2; by = column;
        list(table.tHead.rows[0].cells).forEach(function (other) { if (other.hasAttribute("aria-sort")) { other.setAttribute("aria-sort", "none"); } });
        th.setAttribute("aria-sort", up ? "ascending" : "descending");
        choose();
      });
    });
  }

  // ---- the map ----

  var panel = get("detail"), from = null, lead = document.querySelector("a[data-sheet]"), leading = lead ? +lead.dataset.sheet : null;
  function place(td) {
    var heat = td.closest("[data-heat]"), model = heat.dataset.heat === "model", name = td.parentNode.cells[0].textContent, top = heat.tHead.rows[0].cells[td.cellIndex].textContent;
    return model ? { phase: top, layer: "", point: name } : { phase: heat.dataset.heat, layer: top, point: "layers." + top + "." + name, name: name };
  }
  function open(td, focus) {
    var at = place(td), found = byCell[at.phase + "|" + at.layer + "|" + at.point] || [];
    get("detail-title").textContent = (at.layer === "" ? "" : "layer " + at.layer + " ") + (at.name || at.point) + ", " + at.phase + ": " + td.textContent;
    get("detail-note").textContent = (found.length === 1 ? "1 gate" : found.length + " gates") + (td.title ? ". " + td.title : "");
    var target = get("detail-rows"); target.textContent = "";
    found = found.filter(function (row) { return row.place === leading; }).concat(found.filter(function (row) { return row.place !== leading; }));
    found.forEach(function (row) { var tr = made(row); tr.removeAttribute("id"); tr.querySelector("td.wide details").open = true; target.appendChild(tr); });
    list(document.querySelectorAll(".c.picked")).forEach(function (c) { c.classList.remove("picked"); });
    td.classList.add("picked"); from = td; panel.hidden = false; panel.scrollTop = 0;
    td.scrollIntoView({ block: "nearest", inline: "nearest" });
    if (focus) { panel.focus({ preventScroll: true }); }
  }
  function close() {
    if (panel.hidden) { return; }
    panel.hidden = true;
    if (from) { from.classList.remove("picked"); if (from.firstElementChild) { from.firstElementChild.focus({ preventScroll: true }); } }
    if (location.hash.indexOf("#cell-") === 0) { go(location.pathname + location.search); }
  }
  function go(address) { try { history.replaceState(null, "", address); } catch (refused) { if (address.charAt(0) === "#") { location.hash = address; } } }
  function grid(block) {
    var parts = list(block.querySelectorAll("[data-heat]")), lines = [];
    parts.forEach(function (heat) {
      list(heat.tBodies[0].rows).forEach(function (tr, y) {
        lines[y] = (lines[y] || []).concat(list(tr.cells).slice(1).map(function (td) { return td.querySelector("a"); }));
      });
    });
    var links = [].concat.apply([], lines).filter(Boolean);
    if (!links.length) { return; }
    links.forEach(function (a) { a.tabIndex = -1; });
    links[0].tabIndex = 0;
    function move(a) { links.forEach(function (other) { other.tabIndex = -1; }); a.tabIndex = 0; a.focus(); if (!panel.hidden) { select(a, false); } }
    function select(a, focus) { var td = a.closest("td"); go("#" + td.id); open(td, focus); }
    block.addEventListener("focusin", function (event) { if (links.indexOf(event.target) >= 0) { links.forEach(function (other) { other.tabIndex = -1; }); event.target.tabIndex = 0; } });
    block.addEventListener("click", function (event) {
      var td = event.target.closest("td.c"), a = td && td.querySelector("a");
      if (a && links.indexOf(a) >= 0 && !event.ctrlKey && !event.metaKey && !event.shiftKey) { event.preventDefault(); select(a, event.detail === 0); }
    });
    block.addEventListener("keydown", function (event) {
      var step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -1e6], End: [0, 1e6] }[event.key], y, x, best = null;
      if (!step || links.indexOf(event.target) < 0) { return; }
      event.preventDefault();
      for (y = 0; y < lines.length && lines[y].indexOf(event.target) < 0; y += 1) { /* the row of the cell */ }
      x = lines[y].indexOf(event.target);
      if (Math.abs(step[1]) > 1) { best = lines[y].filter(Boolean)[step[1] < 0 ? "shift" : "pop"](); } else {
        for (y += step[0], x += step[1]; !best && lines[y] && x >= 0 && x < lines[y].length; y += step[0], x += step[1]) { best = lines[y][x]; }
      }
      if (best) { move(best); }
    });
  }

  // ---- addresses, copying ----

  // The cell of the map that a row stands in, where it has one.
  function cell(row) {
    return list(document.querySelectorAll("[data-heat] td.c[id]")).filter(function (td) { var at = place(td); return (byCell[at.phase + "|" + at.layer + "|" + at.point] || []).indexOf(row) >= 0; })[0];
  }
  function arrive() {
    var hash = decodeURIComponent(location.hash.slice(1)), td = hash.indexOf("cell-") === 0 && get(hash), row = /^v\d+$/.test(hash) && byPlace[hash.slice(1)], at, shut;
    if (td) {
      for (shut = td.closest("details"); shut; shut = shut.parentNode.closest("details")) { shut.open = true; }
      open(td, false);
      return;
    }
    if (!panel.hidden) { panel.hidden = true; from.classList.remove("picked"); }
    if (row) {
      pinned = row;
      if (order.indexOf(row) < 0) { clear(); } else { draw(); }
      at = get("v" + row.place); at.tabIndex = -1; at.scrollIntoView({ block: "center" }); at.focus({ preventScroll: true });
    } else if (hash && get(hash)) {
      for (shut = get(hash).closest("details"); shut; shut = shut.parentNode.closest("details")) { shut.open = true; }
      get(hash).scrollIntoView();
    }
  }
  function dress(root) {
    list(root.querySelectorAll("code.cmd")).forEach(function (code) {
      var button = document.createElement("button");
      button.type = "button"; button.className = "copy"; button.textContent = "copy"; button.setAttribute("aria-label", "copy the command");
      code.insertAdjacentElement("afterend", button);
    });
  }
  function tell(button, word) {
    var said = get("said");
    button.textContent = word; button.setAttribute("aria-label", word + "; copy the command again");
    if (!said) { said = document.createElement("p"); said.id = "said"; said.className = "unseen"; said.setAttribute("role", "status"); document.body.appendChild(said); }
    said.textContent = "";
    setTimeout(function () { said.textContent = "the command is " + word; }, 50);  // a change is what is read out
  }
  document.addEventListener("click", function (event) {
    var button = event.target.closest("button.copy"), link = event.target.closest("a[data-v]"), sheet = event.target.closest("a[data-sheet]"), code, range, done;
    if (sheet && byPlace[sheet.dataset.sheet] && cell(byPlace[sheet.dataset.sheet])) {
      event.preventDefault(); code = cell(byPlace[leading]); location.hash = "#" + code.id; open(code, true);
      return;
    }
    if (link) { event.preventDefault(); if (location.hash === "#v" + link.dataset.v) { arrive(); } else { location.hash = "#v" + link.dataset.v; } }
    if (!button) { return; }
    code = button.previousElementSibling; range = document.createRange();
    range.selectNodeContents(code); getSelection().removeAllRanges(); getSelection().addRange(range);
    done = navigator.clipboard ? navigator.clipboard.writeText(code.textContent) : Promise.resolve(document.execCommand("copy"));
    done.then(function () { tell(button, "copied"); }, function () { tell(button, "selected"); });
  });
  document.addEventListener("keydown", function (event) { if (event.key === "Escape") { close(); } });

  // ---- start ----

  function ready() {
    rows.forEach(function (row) {
      if (row.mode === "operation") { return; }
      var at = row.phase + "|" + row.layer + "|" + first(row, 1);
      (byCell[at] = byCell[at] || []).push(row);
    });
    choose(); arrive();
    document.documentElement.dataset.ready = rows.length;
  }
  function unpack(packed) {
    var bytes = Uint8Array.from(atob(packed.content.textContent), function (c) { return c.charCodeAt(0); });
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
  }
  list(body.rows).forEach(function (tr) { add(tr.outerHTML); });
  dress(document); sortable();
  list(document.querySelectorAll("[data-block]")).forEach(grid);
  list(document.querySelectorAll(".scripted")).forEach(function (one) { one.hidden = false; });
  document.querySelector(".filters").hidden = false;
  get("f-text").addEventListener("input", choose);
  picks.forEach(function (p) { p[1].addEventListener("change", choose); });
  get("f-clear").addEventListener("click", clear);
  get("f-more").addEventListener("click", function () { limit += MORE; draw(); });
  get("detail-close").addEventListener("click", close);
  window.addEventListener("hashchange", arrive);
  window.addEventListener("beforeprint", paper);
  window.addEventListener("afterprint", draw);
  var packed = get("packed");
  if (!rows.length) { document.documentElement.dataset.ready = 0; return; }
  if (!packed) { ready(); return; }
  unpack(packed).then(function (lines) { lines.split("\n").forEach(add); get("behind").hidden = true; ready(); },
    function () { get("behind").textContent = "This browser cannot unpack the " + get("behind").dataset.packed + " best-behaved rows: they are in run.jsonl and junit.xml."; ready(); });
})();
