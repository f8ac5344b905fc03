// Payouts in exact integer cents: the same steps as fedmerit.scoring.rewards, on BigInt.

const WHOLE = 10n ** 9n; // shares that sum to 1 within one part in this are paid out in full
const DUST = 10n ** 6n; // all rounding errors together: at most one part in this of a cent
const UNIT = 10n ** BigInt(data.decimals); // cents in a unit of the currency
const LARGEST = 10n ** 24n * UNIT; // cents

// Every way to read a number, as [whole, decimals]: the same as fedmerit.scoring.amounts.
function readings(text) {
  const found = [[".", ","], [",", "."]].flatMap(([mark, other]) => {
    const grouped = `([1-9][0-9]{0,2})(['\u2019 \u00a0\u2009\u202f]|\\${other})([0-9]{3}(?:\\2[0-9]{3})*)`;
    const match = new RegExp(`^(?:${grouped}|([0-9]+))(?:\\${mark}([0-9]+))?$`).exec(text);
    return match === null ? [] : [[match[4] ?? match[1] + match[3].replaceAll(match[2], ""), match[5] ?? ""]];
  });
  return found.length === 2 && String(found[0]) === String(found[1]) ? [found[0]] : found;
}

function cents(text, words) {
  const found = readings(text.trim());
  if (found.length === 0) throw new Error(words.amount);
  if (found.length > 1) throw new Error(words.twice);
  const [[whole, part]] = found;
  if (part.length > data.decimals) throw new Error(words.decimals);
  const amount = BigInt(whole + part.padEnd(data.decimals, "0"));
  if (amount >= LARGEST) throw new Error(words.large);
  return amount;
}

function payouts(rule, name, budget) {
  const parts = rule.parts.map(([who, part]) => [who, BigInt(part)]);
  const one = BigInt(rule.one);
  const total = parts.reduce((sum, [, part]) => sum + part, 0n);
  let amounts;
  if (one - total <= one / WHOLE && name !== "impartial") {
    amounts = parts.map(([who, part]) => ({ who, amount: (budget * part) / total, rest: (budget * part) % total }));
    let left = budget - amounts.reduce((sum, { amount }) => sum + amount, 0n);
    // equal remainders, up to dust from each to the next, share a place; parts stand in the order of names, and
    // the sort is stable: equals go by name
    const dust = total / (DUST * BigInt(parts.length));
    const order = [...amounts].sort((a, b) => (a.rest < b.rest ? 1 : a.rest > b.rest ? -1 : 0));
    order.forEach((each, k) => {
      each.place = k === 0 ? 0 : order[k - 1].place + (order[k - 1].rest - each.rest > dust ? 1 : 0);
    });
    for (const each of [...amounts].sort((a, b) => a.place - b.place)) {
      if (left === 0n) break;
      each.amount += 1n;
      left -= 1n;
    }
  } else {
    const unit = total > one ? total : one;
    const dust = unit / (DUST * BigInt(parts.length)); // a share of 0.25 less a rounding error is 0.25
    amounts = parts.map(([who, part]) => ({ who, amount: (budget * part + dust) / unit }));
  }
  return { amounts, unpaid: budget - amounts.reduce((sum, { amount }) => sum + amount, 0n) };
}

const STEP = 10000n; // ends of intervals of shares are whole numbers of these parts

// The ends of the interval of an amount: that of its share, of the budget, rounded outwards to the cent.
function ends(budget, amount, low, high) {
  const down = (budget * BigInt(low)) / STEP;
  const up = (budget * BigInt(high) + STEP - 1n) / STEP;
  return [down < amount ? down : amount, up > amount ? up : amount];
}

function money(amount) {
  const digits = (amount / UNIT).toString().replace(/\B(?=([0-9]{3})+$)/g, data.words.thousands);
  if (data.decimals === 0) return digits;
  return `${digits}${data.words.decimal}${(amount % UNIT).toString().padStart(data.decimals, "0")}`;
}
