// Computes the payouts for any budget and rule.

const field = document.getElementById("budget");
const choice = document.getElementById("rule");
const problem = document.getElementById("problem");
const result = document.getElementById("payouts");

function row(cells) {
  const line = document.createElement("tr");
  cells.forEach((text, place) => {
    const cell = document.createElement(place === 0 ? "th" : "td");
    if (place === 0) cell.scope = "row";
    if (place === 0 && text.length > 12) cell.className = "long";
    cell.textContent = text;
    line.append(cell);
  });
  return line;
}

function pay() {
  const rule = data.rules[choice.value];
  document.getElementById("about").textContent = rule.about;
  const notes = document.getElementById("notes");
  notes.replaceChildren(...rule.notes.map((note) => Object.assign(document.createElement("li"), { textContent: note })));
  const [body, foot] = [result.tBodies[0], result.tFoot];
  let paid, budget;
  try {
    if (rule.problem) throw new Error(data.words.problem.replace("%s", () => rule.problem));
    budget = cents(field.value, data.words);
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
  const cells = (who, amount) => {
    const [share, span, low, high] = told.get(who);
    const sure = span === undefined ? ["-", "-"] : [span, within(budget, amount, low, high)];
    return [who, share, money(amount), ...(data.sure ? sure : [])];
  };
  const last = (mark) => (data.sure ? [mark, mark, ""] : [""]);
  const most = paid.amounts.reduce((found, { amount }) => (amount > found ? amount : found), 1n);
  const best = [...paid.amounts].sort((a, b) => (a.amount < b.amount ? 1 : a.amount > b.amount ? -1 : 0));
  body.replaceChildren(
    ...best.map(({ who, amount }) => {
      const line = row(cells(who, amount));
      const bar = line.insertCell();
      bar.className = "bar";
      const fill = bar.appendChild(document.createElement("span"));
      fill.style.inlineSize = `${Number((amount * 1000n) / most) / 10}%`;
      return line;
    }),
    ...data.unscored.map((who) => row([who, "0.00%", money(0n), ...last("-")])),
  );
  foot.replaceChildren(
    row([data.words.unpaid, "", money(paid.unpaid), ...last("")]),
    row([data.words.budget, "", money(budget), ...last("")]),
  );
}

field.addEventListener("input", pay);
choice.addEventListener("change", pay);
pay();
