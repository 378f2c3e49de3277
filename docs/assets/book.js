// What Material's scripts leave undone for readers who use the keyboard, listen to the page or print it.
const boxes = ".book-scroll, .md-typeset__scrollwrap, pre, pre > code, pre > samp";

// A box can be reached by the keyboard while there is something to scroll in it.
const check = (box) => {
  if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  else box.removeAttribute("tabindex");
};
const checkAll = () => document.querySelectorAll(boxes).forEach(check);
const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => check(target)));
document.fonts.addEventListener("loadingdone", checkAll); // letters grow, their box does not

// The copy button of each listing is a landmark of its own otherwise.
const additions = new MutationObserver(() => {
  document.querySelectorAll("nav.md-code__nav").forEach((nav) => nav.setAttribute("role", "none"));
});
additions.observe(document.body, { childList: true, subtree: true });

document$.subscribe(() => {
  sizes.disconnect();
  document.querySelectorAll(boxes).forEach((box) => sizes.observe(box));
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
});

// On paper the targets of links stand below, numbered.
addEventListener("beforeprint", () => {
  const targets = document.createElement("ol");
  targets.className = "book-links";
  for (const link of document.querySelectorAll(".md-content__inner a[href^=http]")) {
    if (link.host === location.host) continue;
    targets.insertAdjacentElement("beforeend", document.createElement("li")).textContent = link.href;
    link.insertAdjacentHTML("afterend", `<sup class="book-links">${targets.children.length}</sup>`);
  }
  if (targets.children.length) document.querySelector(".md-content__inner").append(targets);
});
addEventListener("afterprint", () => document.querySelectorAll(".book-links").forEach((one) => one.remove()));
