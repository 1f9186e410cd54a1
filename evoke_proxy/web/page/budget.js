// The fields for budgets: a number of tokens, or one of the words that the admin API accepts.

import { byId } from "./dom.js";

// What the words of a field mean to the admin API.
const WORDS = { auto: "auto", off: null, default: "default" };
const EXAMPLE = "8192";
let changes = 0;

// How often this page has begun or finished setting a budget. Facts that were asked for at another count
// may be from before the change.
export const budgetChanges = () => changes;

export function budgetText(budget) {
  return budget === null || budget === undefined ? "off" : String(budget);
}

// The value for the admin API; raises an error that says what to type.
function parsed(text, words) {
  const given = text.trim().toLowerCase();
  if (words.includes(given)) return WORDS[given];
  const digits = given.replace(/[,_\s]/g, "");
  if (/^[1-9]\d*$/.test(digits)) return Number(digits);
  throw new Error(`Type a number of tokens (${EXAMPLE}), ${words.join(" or ")}.`);
}

// Has a form send its budget by `send(budget)`, then calls `refresh`. Shows the error of the field or of the
// proxy beside the field until its text changes. The words of the form are those in bold in its help.
export function budgetForm(form, send, refresh) {
  const field = form.querySelector("input"), error = form.querySelector(".error");
  const words = [...form.querySelectorAll(".help b")].map((word) => word.textContent);
  function complain(message) {
    error.textContent = message;
    field.setAttribute("aria-invalid", String(Boolean(message)));
  }
  let latest = Promise.resolve();  // the setting that is under way: the next one waits for it
  field.setAttribute("aria-invalid", "false");
  field.addEventListener("input", () => complain(""));
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || field.value === field.dataset.current) return;
    field.value = field.dataset.current;
    complain("");
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      const given = field.value, budget = parsed(given, words);
      const setting = latest.then(() => send(budget));
      latest = setting.catch(() => {});
      changes += 1;
      try {
        await setting;
      } finally {
        changes += 1;
      }
      field.dataset.current = budgetText(budget);
      // Keep what its user has typed since.
      if (field.value === given) field.value = field.dataset.current;
      complain("");
      refresh();
    } catch (problem) {
      complain(problem.message);
    }
  });
}

// Shows the budget that is in force, unless its user has typed something that is not set yet, or a budget
// was set since the facts were asked for at the count `asked` of changes. Text that its user has selected
// to type over it stays selected.
export function showBudget(id, text, asked) {
  if (asked !== changes) return;
  const field = byId(id);
  const isEdited = field.dataset.current !== undefined && field.value !== field.dataset.current;
  const isSelected = document.activeElement === field && field.selectionEnd > field.selectionStart;
  if (!isEdited && field.value !== text) {
    field.value = text;
    if (isSelected) field.select();
  }
  field.dataset.current = text;
}
