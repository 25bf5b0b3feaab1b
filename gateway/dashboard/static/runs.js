// Stretches of equal value: a trajectory of 32 k tokens becomes a handful of elements.

// [{from, to, value}] over [from, to), with value = read(i).
export function runs(from, to, read) {
  const found = [];
  for (let i = from; i < to; i += 1) {
    const value = read(i);
    const last = found.at(-1);
    if (last && last.value === value) last.to = i + 1;
    else found.push({ from: i, to: i + 1, value });
  }
  return found;
}

// A trajectory cut where sampling begins and ends, and where a turn does.
export function segmentsOf(row) {
  const starts = new Set(row.turns.map((turn) => turn.start));
  let number = 0;
  return runs(0, row.input_ids.length, (i) => {
    if (starts.has(i)) number += 1;
    return row.loss_mask[i] ? number + 1 : -number - 1;
  }).map(({ from, to, value }) => ({
    from,
    to,
    isSampled: value > 0,
    turn: value > 0 ? row.turns.findIndex((turn) => turn.start <= from && from < turn.end) : -1,
  }));
}
