import { h, bar, memberLink, prose, trustMark } from './dom.js';
import { number, percentOf, span } from './format.js';
import { adviceOn } from './model.js';

// Parts of a cost, in the order in which they pass.
const parts = [
  ['wait', 'wait', 'until its first own step'],
  ['load', 'load', 'blocks from host and disk'],
  ['prefill', 'prefill', 'computing what is not cached'],
  ['miss', 'miss', 'price of the miss to others'],
  ['evict', 'evict', 'what this pushes out'],
  ['decode', 'decode', 'what the running batch adds'],
];

const cachedParts = [
  ['gpu', 'GPU memory'],
  ['host', 'host memory'],
  ['disk', 'disk'],
  ['predicted', 'under way'],
];

function legend(list) {
  return h('ul', { class: 'legend' }, list.map(([name, title, about]) => h('li', null, h('i', { 'data-part': name }), title, about ? ` – ${about}` : '')));
}

const held = (c) => cachedParts.reduce((sum, [name]) => sum + (c.cached_tokens?.[name] || 0), 0);

// ranking of an answer: the sentence, what was missing, and each candidate's cost
// by part.
export function ranking(r, caption) {
  const candidates = r.candidates || [];
  const most = Math.max(...candidates.map((c) => c.cost?.total_ms || 0), 0.001);
  const timed = candidates.some((c) => parts.some(([name]) => c.cost?.[`${name}_ms`] > 0));
  const used = timed ? parts.filter(([name]) => candidates.some((c) => c.cost[`${name}_ms`] > 0)) : [['score', `score of the policy ${r.policy}, lower is better`]];
  const cached = cachedParts.filter(([name]) => candidates.some((c) => c.cached_tokens?.[name] > 0));
  const prompt = r.prompt_tokens;
  return h('div', { class: 'ranking' },
    h('p', { class: 'sentence' }, r.explanation),
    h('p', { class: 'note' }, [
      `Policy ${r.policy}`, prompt ? `prompt of ${number(prompt)} tokens` : 'prompt not known',
      `${number(r.eligible_members)} members compared`, r.queued_ms >= 1 ? `waited ${span(r.queued_ms)} for room` : '',
      r.slack_ms !== undefined ? `${span(r.slack_ms)} left of its target` : '',
    ].filter(Boolean).join(' · ')),
    (r.fallbacks || []).length > 0 && h('ul', { class: 'items' }, r.fallbacks.map((f) => h('li', null,
      h('span', { class: 'look' }, `What was missing: ${f.explanation}`), h('p', { class: 'advice' }, prose(adviceOn(f.explanation)))))),
    h('div', { class: 'wide', tabindex: 0, role: 'region', 'aria-label': caption }, h('table', null,
      h('caption', { class: 'hidden' }, caption),
      h('thead', null, h('tr', null, h('th', { scope: 'col' }, 'Member'), h('th', { scope: 'col', class: 'cost' }, timed ? 'Predicted time by part' : 'Score'),
        h('th', { scope: 'col', class: 'num' }, timed ? 'Time' : 'Score'), h('th', { scope: 'col', class: 'num' }, 'Cached'),
        h('th', { scope: 'col', class: 'num few' }, 'Running'), h('th', { scope: 'col', class: 'num few' }, 'Waiting'), h('th', { scope: 'col', class: 'few' }, 'Cache state'))),
      h('tbody', null, candidates.map((c, i) => {
        const cost = c.cost || {};
        const shares = timed ? used.map(([name]) => [name, cost[`${name}_ms`] / most]) : [['score', cost.total_ms / most]];
        const spoken = timed ? used.map(([name, title]) => `${title} ${span(cost[`${name}_ms`])}`).join(', ') : `score ${cost.total_ms}`;
        const tokens = held(c);
        return h('tr', null,
          h('th', { scope: 'row', title: c.member.id }, memberLink(c.member.id, c.member.pod + (c.member.rank ? ` rank ${c.member.rank}` : '')), i === 0 && h('span', { class: 'note' }, ' first')),
          h('td', { class: 'cost' }, bar(shares.filter(([, share]) => share > 0), spoken)),
          h('td', { class: 'num' }, timed ? span(cost.total_ms) : number(cost.total_ms)),
          h('td', { class: 'num' }, prompt ? percentOf(tokens, prompt) : '–',
            prompt > 0 && bar(cachedParts.map(([name]) => [name, (c.cached_tokens?.[name] || 0) / prompt]).filter(([, share]) => share > 0), `${number(tokens)} of ${number(prompt)} prompt tokens cached`, true)),
          h('td', { class: 'num few' }, number(c.running_requests)), h('td', { class: 'num few' }, number(c.waiting_requests)),
          h('td', { class: 'few' }, trustMark((c.cache_state?.trust || 'TRUST_UNKNOWN').slice(6))));
      })))),
    legend(used),
    cached.length > 0 && legend(cached.map(([name, title]) => [name, `cached: ${title}`])));
}
