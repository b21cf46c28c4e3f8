import { asked } from './asked.js';
import { chart, lineKey } from './chart.js';
import { bar, h, memberLink, prose, slot, trustMark } from './dom.js';
import { clock, number, percent, percentOf, plural } from './format.js';
import { adviceOn, meaning, out, trusts } from './model.js';

const named = 8;

// truth shows how far what is believed of caches is true, and why not further.
export function truth() {
  const trust = slot(h('section', { class: 'card' }));
  const kept = slot(h('section', { class: 'card' }));
  const reasons = slot(h('section', { class: 'card' }));
  const versions = slot(h('section', { class: 'card' }));
  const over = slot(h('section', { class: 'card' }));
  const source = asked('v1/history', 10000, () => over.show([source.failed, source.answer], () => [h('h2', null, 'The last hour'), source.failed ? h('p', { class: 'error' }, source.failed) : hour(source.answer.points || [])]));
  const element = h('div', { class: 'stack' },
    h('div', null, h('h1', null, 'Is what it believes true?'),
      h('p', { class: 'lead' }, 'Every decision stands on what members’ caches are believed to hold. Here is how far that is proven, and what engines said afterwards.')),
    h('div', { class: 'pair' }, trust.element, kept.element), over.element, reasons.element, versions.element);
  return {
    element,
    close: () => source.stop(),
    update({ members, sums: t }) {
      const n = members.length;
      trust.show(t.trust, () => [
        h('h2', null, 'Members by trust'),
        n === 0 ? h('p', { class: 'empty' }, 'There are no members.') : [
          bar(trusts.map((name) => [name, t.trust[name] / n]).filter(([, share]) => share > 0), trusts.map((name) => `${t.trust[name]} ${name}`).join(', ')),
          h('table', null, h('caption', { class: 'hidden' }, 'Members by trust'),
            h('tbody', null, trusts.map((name) => h('tr', null, h('th', { scope: 'row' }, trustMark(name)), h('td', { class: 'num' }, number(t.trust[name])), h('td', null, meaning[name]))))),
        ],
      ]);
      kept.show([t.predicted, t.cached, t.requests], () => [
        h('h2', null, 'Predicted against actual'),
        t.requests === 0 ? h('p', { class: 'empty' }, 'No caller has reported what an engine found in its cache.') : [
          h('dl', { class: 'facts' },
            h('dt', null, 'Promised'), h('dd', null, `${number(t.predicted)} cached tokens`),
            h('dt', null, 'Found by engines'), h('dd', null, `${number(t.cached)} cached tokens`),
            h('dt', null, 'Difference'), h('dd', { class: t.cached < 0.98 * t.predicted ? 'look' : '' }, difference(t)),
            h('dt', null, 'Over'), h('dd', null, plural(t.requests, 'reported request'))),
        ],
      ]);
      const groups = findings(members);
      reasons.show(groups.map((g) => [g.why, g.members.map((m) => m.id), adviceOn(g.why)]), () => [
        h('h2', null, 'What to look at'),
        groups.length === 0
          ? h('p', { class: 'empty' }, n ? 'Nothing: every cache state is EXACT, and every member takes part in picks.' : 'Nothing yet.')
          : h('ul', { class: 'items' }, groups.map((g) => h('li', null,
            h('h3', null, g.trust && [trustMark(g.trust), ' '], g.why || 'no reason was given'),
            h('p', { class: 'advice' }, prose(adviceOn(g.why) || g.advice || '')),
            h('p', { class: 'who' }, `${plural(g.members.length, 'member')}: `,
              g.members.slice(0, named).map((m, i) => [i ? ', ' : '', memberLink(m.id, m.name)]), g.members.length > named && ` and ${number(g.members.length - named)} more`)))),
      ]);
      const engines = counted(members, (m) => `vLLM ${m.engine}`);
      const agents = counted(members, (m) => `agent ${m.agent}`);
      versions.show([engines, agents], () => [
        h('h2', null, 'Versions'),
        n === 0 ? h('p', { class: 'empty' }, 'There are no members.') : h('table', { class: 'brief' }, h('caption', { class: 'hidden' }, 'Versions of engines and agents'),
          h('thead', null, h('tr', null, h('th', { scope: 'col' }, 'Release'), h('th', { scope: 'col', class: 'num' }, 'Members'))),
          h('tbody', null, [...engines, ...agents].map(([name, count]) => h('tr', null, h('th', { scope: 'row' }, name), h('td', { class: 'num' }, number(count)))))),
      ]);
    },
  };
}

// hour shows the share of prompt tokens that was promised as cached, and what was
// found, from point to point.
function hour(points) {
  const lines = { promised: [], found: [] };
  for (let i = 1; i < points.length; i += 1) {
    const grown = (key) => Number(points[i][key] || 0) - Number(points[i - 1][key] || 0);
    const prompt = grown('reported_prompt_tokens');
    if (prompt <= 0) continue;
    lines.promised.push([Number(points[i].time_ms), grown('predicted_cached_tokens') / prompt]);
    lines.found.push([Number(points[i].time_ms), grown('reported_cached_tokens') / prompt]);
  }
  if (lines.found.length < 2) return h('p', { class: 'empty' }, 'There is nothing to draw yet: a point is made every ten seconds in which outcomes are reported.');
  const [, last] = lines.found.at(-1);
  return [
    chart({ label: `Share of prompt tokens cached: at last ${percent(lines.promised.at(-1)[1])} promised, ${percent(last)} found`, max: 1,
      series: [{ kind: 'accent', points: lines.found, area: true }, { kind: 'soft', points: lines.promised }], y: (v) => percent(v), x: clock }),
    h('ul', { class: 'legend' }, h('li', null, lineKey('accent'), 'found by engines'), h('li', null, lineKey('soft'), 'promised'), h('li', null, 'share of prompt tokens of requests reported in each 10 s')),
  ];
}

function difference({ predicted, cached }) {
  if (predicted === cached) return 'none';
  const more = cached > predicted;
  return `${number(Math.abs(cached - predicted))} tokens ${more ? 'more' : 'less'} than promised (${percentOf(Math.abs(cached - predicted), predicted)})`;
}

const outAdvice = {
  SLEEPING: 'Nothing: it is picked again when it wakes.',
  SILENT: 'See whether its agent runs and reaches NATS.',
  UNREACHABLE: 'See whether the engine serves at the address that its agent was given.',
  FAILING: 'See the engine’s log: callers could not be served by it.',
  CORDONED: 'Nothing, where the node is being emptied: it is picked only where no other can be.',
  NOT_READY: 'See the pod’s readiness probe.',
  EVICTED: 'Nothing: its work moves to others.',
  DELETING: 'Nothing: its work moves to others.',
  ENDED: 'Nothing, where it was meant to end.',
};

// findings groups members by what is wrong with them, the worst first.
function findings(members) {
  const groups = new Map();
  const add = (key, of, m) => {
    const group = groups.get(key) || { ...of, members: [] };
    group.members.push(m);
    groups.set(key, group);
  };
  for (const m of members) {
    if (m.ineligible) add(`out ${m.ineligible}`, { why: `out of picks: ${out(m)}`, advice: outAdvice[m.ineligible], rank: 0 }, m);
    if (m.trust !== 'EXACT') add(`${m.trust} ${m.why}`, { trust: m.trust, why: m.why, rank: 1 + trusts.length - trusts.indexOf(m.trust) }, m);
    if (m.warning) add(`warning ${m.warning}`, { why: m.warning, rank: 9 }, m);
  }
  return [...groups.values()].sort((a, b) => a.rank - b.rank || b.members.length - a.members.length);
}

function counted(members, name) {
  const counts = new Map();
  for (const m of members) counts.set(name(m), (counts.get(name(m)) || 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}
