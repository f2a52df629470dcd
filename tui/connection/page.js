// The keyboard goes to the console as soon as it is drawn, and again when the window has the focus.
const focusConsole = () => document.querySelector("textarea")?.focus();
const options = { subtree: true, childList: true, attributes: true, attributeFilter: ["class"] };
const observer = new MutationObserver(() => {
  focusConsole();
  if (document.body.classList.contains("-first-byte")) observer.disconnect();
});
observer.observe(document.body, options);
window.addEventListener("focus", focusConsole);
