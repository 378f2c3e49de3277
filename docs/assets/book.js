// What Material's scripts leave undone for readers who use the keyboard or listen to the page.
const boxes = ".book-scroll, .md-typeset__scrollwrap, .md-typeset pre, .md-typeset pre > code";

// A box can be reached by the keyboard while there is something to scroll in it.
const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});

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
