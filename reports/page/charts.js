(function () {
  "use strict";
  var pick = document.getElementById("query-pick");
  if (!pick) { return; }
  var select = pick.querySelector("select");
  var all = Array.prototype.slice.call(document.querySelectorAll("details.query-of"));
  function show() {
    all.forEach(function (one) { one.hidden = one.id !== select.value; if (!one.hidden) { one.open = true; } });
  }
  function follow() {
    var wanted = location.hash.slice(1);
    if (all.some(function (one) { return one.id === wanted; })) { select.value = wanted; show(); document.getElementById(wanted).scrollIntoView(); }
  }
  pick.hidden = false;
  select.addEventListener("change", function () { show(); history.replaceState(null, "", "#" + select.value); });
  window.addEventListener("hashchange", follow);
  show();
  follow();
})();
