// Computes the payouts for any budget and rule, and folds long tables.

const field = document.getElementById("budget");
const choice = document.getElementById("rule");
const problem = document.getElementById("problem");
const result = document.getElementById("payouts");
const notes = document.getElementById("notes");
const trial = document.getElementById("trial");
const back = document.getElementById("back");
const decided = { table: result.innerHTML, budget: field?.value, rule: choice?.value, about: document.getElementById("about")?.textContent };

function line(x1, x2, y1, y2) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "line");
  Object.entries({ x1: `${x1}%`, x2: `${x2}%`, y1, y2 }).forEach(([key, value]) => made.setAttribute(key, value));
  return made;
}

function bar(width, low, high) {
  const drawn = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  drawn.setAttribute("aria-hidden", "true");
  drawn.setAttribute("focusable", "false");
  const rect = drawn.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "rect"));
  Object.entries({ y: 3, height: 10, width: `${width}%` }).forEach(([key, value]) => rect.setAttribute(key, value));
  if (low !== undefined) drawn.append(line(low, high, 8, 8), line(low, low, 4.5, 11.5), line(high, high, 4.5, 11.5));
  return drawn;
}

function row(name, cells) {
  const made = document.createElement("tr");
  const head = made.appendChild(document.createElement("th"));
  head.scope = "row";
  head.className = name.length > 12 ? "long" : "short";
  head.textContent = name;
  for (const [kind, content] of cells) {
    const cell = made.insertCell();
    if (kind) cell.className = kind;
    cell.append(content);
    if (kind === "wide" && /[0-9]/.test(content)) cell.previousSibling.dataset.within = content;
  }
  return made;
}

function cells(drawn, amount, within, share, why) {
  if (result.classList.contains("unpriced")) amount = within = "";
  const span = data.sure ? [["wide", within]] : [];
  return [["bar", drawn], ["amount", amount], ...span, ["share", share], ["text why", why]];
}

function pay() {
  const rule = data.rules[choice.value];
  document.getElementById("about").textContent = rule.about;
  const unpriced = !data.decided && field.value.trim() === ""; // without a budget there are only shares
  result.classList.toggle("unpriced", unpriced);
  result.caption.textContent = unpriced ? data.words.shares : result.dataset.trial;
  notes.replaceChildren(...rule.notes.map((note) => Object.assign(document.createElement("li"), { textContent: note })));
  let paid, budget;
  try {
    if (rule.problem) throw new Error(data.words.problem.replace("%s", () => rule.problem));
    budget = unpriced ? BigInt(rule.one) : cents(field.value, data.words);
    paid = payouts(rule, choice.value, budget);
  } catch (error) {
    problem.textContent = error.message;
    field.setAttribute("aria-invalid", rule.problem ? "false" : "true");
    result.hidden = true;
    return;
  }
  problem.textContent = "";
  field.setAttribute("aria-invalid", "false");
  result.hidden = false;
  const told = new Map(rule.parts.map(([who, , ...rest]) => [who, rest]));
  const sure = ({ who, amount }) => (told.get(who)[1] === undefined ? undefined : ends(budget, amount, ...told.get(who).slice(2)));
  const most = paid.amounts.reduce((found, each) => {
    const high = sure(each)?.[1] ?? each.amount;
    return high > found ? high : found;
  }, 1n);
  const percent = (amount) => Number((amount * 10000n) / most) / 100;
  const best = [...paid.amounts].sort((a, b) => (a.amount < b.amount ? 1 : a.amount > b.amount ? -1 : 0));
  result.tBodies[0].replaceChildren(
    ...best.map((each) => {
      const within = sure(each);
      const drawn = within ? bar(percent(each.amount), percent(within[0]), percent(within[1])) : bar(percent(each.amount));
      const span = within ? `${money(within[0])}\u2013${money(within[1])}` : "-";
      const [share, around] = told.get(each.who);
      const shown = within && !data.decided ? `${share} (${around})` : share;
      return row(each.who, cells(drawn, money(each.amount), span, shown, data.why[each.who] ?? ""));
    }),
    ...data.unscored.map((who) => row(who, cells("", money(0n), "-", data.words.nothing, data.why[who] ?? ""))),
  );
  result.tFoot.replaceChildren(
    row(data.words.unpaid, cells("", money(paid.unpaid), "", rule.unpaid, "")),
    row(data.words.budget, cells("", money(budget), "", "", "")),
  );
  fold(result.tBodies[0]);
}

// A decision stays on the page until the reader tries something else, and comes back at one click.
function attempt() {
  if (data.decided) trial.hidden = back.hidden = false;
  pay();
}

function restore() {
  result.innerHTML = decided.table;
  [field.value, choice.value] = [decided.budget, decided.rule];
  document.getElementById("about").textContent = decided.about;
  problem.textContent = "";
  field.setAttribute("aria-invalid", "false");
  notes.replaceChildren();
  result.hidden = false;
  trial.hidden = back.hidden = true;
}

// Of a long table the first and the last rows are shown; a button shows those between.
function fold(body) {
  const [head, tail, most] = data.fold;
  const rows = [...body.rows];
  if (rows.length <= most) return;
  rows.slice(head, rows.length - tail).forEach((each) => each.classList.add("middle"));
  const made = document.createElement("tr");
  made.className = "fold";
  const button = made.insertCell().appendChild(document.createElement("button"));
  made.cells[0].colSpan = rows[0].cells.length;
  button.type = "button";
  button.setAttribute("aria-expanded", "false");
  button.textContent = data.words.between.replace("%s", rows.length - head - tail);
  rows[head].before(made);
}

// A click, or Enter, on a heading sorts its table by that column, and another one turns the order over.
function sort(head) {
  const table = head.closest("table"), body = table.tBodies[0], at = head.cellIndex;
  const down = head.getAttribute("aria-sort") !== "descending" && (at > 0 || head.ariaSort === "ascending");
  const value = (row) => (row.cells[at].dataset.value === undefined ? row.cells[at].textContent : Number(row.cells[at].dataset.value));
  const rows = [...body.rows].filter((row) => !row.classList.contains("fold"));
  const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  rows.sort((a, b) => (down ? order(value(b), value(a)) : order(value(a), value(b))));
  rows.forEach((row) => row.classList.remove("middle"));
  body.replaceChildren(...rows);
  fold(body);
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
}

for (const head of document.querySelectorAll(".sortable thead th")) {
  head.tabIndex = 0;
  head.title = data.words.sort;
  head.addEventListener("click", () => sort(head));
  head.addEventListener("keydown", (event) => event.key === "Enter" && sort(head));
}

document.documentElement.classList.add("scripted");
document.addEventListener("click", (event) => {
  const button = event.target.closest(".fold button");
  if (!button) return;
  const open = button.getAttribute("aria-expanded") !== "true";
  button.setAttribute("aria-expanded", String(open));
  button.closest("tbody").classList.toggle("unfolded", open);
});
if (field) { // a panel has no other rule to try
  field.addEventListener("input", attempt);
  choice.addEventListener("change", attempt);
  if (data.decided) {
    back.addEventListener("click", restore);
    window.addEventListener("beforeprint", () => back.hidden || restore());
  } else {
    pay();
  }
}
