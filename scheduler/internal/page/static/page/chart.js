import { s } from './dom.js';

const w = 640;
const h = 200;
const left = 44;
const bottom = 24;

// ticks of an axis from 0 to at least max: few, round.
function ticks(max) {
  const rough = (max || 1) / 4;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * size).find((f) => f >= rough);
  const list = [];
  for (let at = 0; at < max + step * 0.999; at += step) list.push(at);
  return list;
}

// chart of lines over x: series are {kind, points: [[x, y]], area}; y and x make
// labels of values. The label is for those who do not see it.
export function chart({ label, series, y, x, max, xs }) {
  const points = series.flatMap((line) => line.points);
  const low = Math.min(...points.map((p) => p[0]));
  const high = Math.max(...points.map((p) => p[0]));
  const steps = ticks(max ?? Math.max(...points.map((p) => p[1])));
  const top = steps.at(-1) || 1;
  const px = (v) => left + ((v - low) / (high - low || 1)) * (w - left - 8);
  const py = (v) => 8 + (1 - v / top) * (h - bottom - 8);
  const at = xs || [low, (low + high) / 2, high];
  return s('svg', { class: 'chart', viewBox: `0 0 ${w} ${h}`, role: 'img', 'aria-label': label },
    steps.map((v) => [
      s('line', { class: 'rule', x1: left, x2: w - 8, y1: py(v), y2: py(v) }),
      s('text', { x: left - 8, y: py(v) + 4, 'text-anchor': 'end' }, y(v)),
    ]),
    at.map((v, i) => s('text', { x: px(v), y: h - 4, 'text-anchor': i === 0 ? 'start' : i === at.length - 1 ? 'end' : 'middle' }, x(v))),
    series.filter((line) => line.points.length > 0).map((line) => {
      const path = line.points.map(([a, b], i) => `${i ? 'L' : 'M'}${px(a).toFixed(1)} ${py(b).toFixed(1)}`).join('');
      return [
        line.area && s('path', { class: `area f-${line.kind}`, d: `${path}L${px(line.points.at(-1)[0]).toFixed(1)} ${py(0)}L${px(line.points[0][0]).toFixed(1)} ${py(0)}Z` }),
        s('path', { class: `line c-${line.kind}`, d: path }),
      ];
    }));
}

// key of a line, for legends.
export function lineKey(kind) {
  return s('svg', { 'aria-hidden': 'true', class: 'key', viewBox: '0 0 22 10' }, s('path', { class: `line c-${kind}`, d: 'M1 5H21' }));
}
