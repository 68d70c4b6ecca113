"use strict";
// From values to positions: axes, ticks, smoothing.

function niceTicks(low, high, about) {
  const span = high - low || 1;
  const raw = span / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw) * power;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + span * 1e-9; i++) ticks.push(i * step);
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  const few = Math.log10(high / low) < 1.7;
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const factor of few ? [1, 2, 5] : [1]) {
      const tick = factor * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  const every = Math.ceil(ticks.length / 5);
  return ticks.filter((_, i) => i % every === 0);
}

const TIME_STEPS = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
];

function timeTicks(low, high, about) {
  const raw = (high - low) / about;
  const step = TIME_STEPS.find((s) => s >= raw) || Math.ceil(raw / 86400) * 86400;
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) ticks.push(i * step);
  return ticks;
}

function clockTick(seconds) {
  if (seconds >= 86400 && seconds % 86400 === 0) return `${seconds / 86400}\u202fd`;
  if (seconds >= 3600)
    return seconds % 3600 === 0
      ? `${seconds / 3600}\u202fh`
      : `${Math.floor(seconds / 3600)}:${String(Math.floor((seconds % 3600) / 60)).padStart(2, "0")}`;
  if (seconds >= 60)
    return seconds % 60 === 0
      ? `${seconds / 60}\u202fmin`
      : `${Math.floor(seconds / 60)}:${String(Math.round(seconds % 60)).padStart(2, "0")}`;
  return `${number(seconds, 2)}\u202fs`;
}

/** A function from a value to a position between `from` and `to`. */
function scale(domain, range, log = false) {
  const f = log ? Math.log10 : (v) => v;
  const [low, high] = domain.map(f);
  const map = (value) => range[0] + ((f(value) - low) / (high - low || 1)) * (range[1] - range[0]);
  map.invert = (position) => {
    const value = low + ((position - range[0]) / (range[1] - range[0])) * (high - low);
    return log ? 10 ** value : value;
  };
  return map;
}

/** Exponential moving average over the points, begun at the first one; gaps stay gaps. */
function smoothed(values, weight) {
  let mean = null;
  return values.map((value) => {
    if (!known(value)) return null;
    mean = mean === null ? value : mean * weight + value * (1 - weight);
    return mean;
  });
}

/** Lowest and highest of those values that `use` accepts; null without any. */
function extent(arrays, use) {
  let low = Infinity;
  let high = -Infinity;
  for (const [xs, values] of arrays)
    for (let i = 0; i < values.length; i++)
      if (known(values[i]) && use(values[i], xs[i])) {
        low = Math.min(low, values[i]);
        high = Math.max(high, values[i]);
      }
  return low <= high ? [low, high] : null;
}

/** Index of the element of the sorted `xs` nearest to `x`. */
function nearest(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
}
