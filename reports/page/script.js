(function () {
  "use strict";
  var rows = Array.prototype.slice.call(document.querySelectorAll("#all tbody tr[data-state]"));
  var count = document.getElementById("f-count");
  var text = document.getElementById("f-text");
  var picks = ["state", "mode", "phase", "layer"].map(function (name) { return [name, document.getElementById("f-" + name)]; });
  function filter() {
    var wanted = text.value.toLowerCase(), shown = 0;
    rows.forEach(function (row) {
      var fits = picks.every(function (p) { return !p[1].value || row.dataset[p[0]] === p[1].value; });
      row.hidden = !(fits && (!wanted || row.textContent.toLowerCase().indexOf(wanted) >= 0));
      if (!row.hidden) { shown += 1; }
    });
    count.textContent = "showing " + shown + " of " + rows.length;
  }
  function reveal() {
    var row = location.hash.indexOf("#v") === 0 && document.getElementById(location.hash.slice(1));
    if (row && row.hidden) { text.value = ""; picks.forEach(function (p) { p[1].value = ""; }); filter(); row.scrollIntoView({ block: "center" }); }
  }
  document.querySelector(".filters").hidden = false;
  text.addEventListener("input", filter);
  picks.forEach(function (p) { p[1].addEventListener("change", filter); });
  window.addEventListener("hashchange", reveal);
  filter();
  document.querySelectorAll("code.cmd").forEach(function (code) {
    var button = document.createElement("button");
    button.type = "button"; button.className = "copy"; button.textContent = "copy";
    button.addEventListener("click", function () {
      var range = document.createRange(), done;
      range.selectNodeContents(code);
      getSelection().removeAllRanges(); getSelection().addRange(range);
      done = navigator.clipboard ? navigator.clipboard.writeText(code.textContent) : Promise.resolve(document.execCommand("copy"));
      done.then(function () { button.textContent = "copied"; }, function () { button.textContent = "selected"; });
    });
    code.insertAdjacentElement("afterend", button);
  });
})();
