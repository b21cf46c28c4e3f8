import { asked } from './asked.js';
import { bar, h, slot } from './dom.js';
import { clock, number, percentOf, span } from './format.js';
import { ranking } from './ranking.js';

const outcomes = { OUTCOME_FIRST_TOKEN: 'decoding', OUTCOME_FINISHED: 'finished', OUTCOME_FAILED: 'failed', OUTCOME_CANCELLED: 'cancelled' };
const parts = ['wait', 'load', 'prefill', 'miss', 'evict', 'decode'];

// recent are the last decisions, of a member where one is named; each unfolds to
// its candidates.
export function recent(member, many = 50) {
  const list = slot(h('div'));
  const unfolded = new Set();
  const query = new URLSearchParams({ max_decisions: many, ...(member ? { member_id: member } : {}) });
  const source = asked(`v1/decisions?${query}`, 3000, () => list.show([source.failed, source.answer], () => {
    if (source.failed) return h('p', { class: 'error' }, source.failed);
    const all = source.answer.decisions || [];
    if (all.length === 0) return h('p', { class: 'empty' }, member ? 'No decision that is kept was for this member.' : 'Nothing was picked yet.');
    const focused = document.activeElement?.closest?.('details')?.dataset.id;
    const most = Math.max(...all.map((d) => d.ranking.candidates[0]?.cost.total_ms || 0), 0.001);
    const rows = all.map((d) => one(d, most, unfolded));
    requestAnimationFrame(() => focused && list.element.querySelector(`details[data-id="${CSS.escape(focused)}"] > summary`)?.focus({ preventScroll: true }));
    return h('div', { class: 'steps recent' }, rows);
  }));
  return { element: list.element, close: () => source.stop() };
}

function one(d, most, unfolded) {
  const id = d.decision_id;
  const first = d.ranking.candidates[0];
  const cost = first?.cost || {};
  const shares = parts.map((name) => [name, (cost[`${name}_ms`] || 0) / most]).filter(([, share]) => share > 0);
  const body = h('div', { class: 'inside' });
  const unfold = () => { if (!body.firstChild) body.append(...inside(d)); };
  const fold = h('details', { 'data-id': id, open: unfolded.has(id), ontoggle: () => {
    if (fold.open) { unfolded.add(id); unfold(); } else unfolded.delete(id);
  } },
  h('summary', null,
    h('span', null, `${clock(Number(d.time_ms))}  ${d.request_id || d.model}`),
    h('span', { class: 'num' }, first ? first.member.pod : '–'),
    bar(shares.length ? shares : [['score', (cost.total_ms || 0) / most]], `expected to take ${span(cost.total_ms)}`, true),
    h('span', { class: 'note' }, [`${span(cost.total_ms)} expected`, cached(first, d.ranking.prompt_tokens), outcome(d)].filter(Boolean).join(' · '))),
  body);
  if (fold.open) unfold();
  return fold;
}

function cached(first, prompt) {
  if (!first || !prompt) return '';
  const c = first.cached_tokens || {};
  return `${percentOf((c.gpu || 0) + (c.host || 0) + (c.disk || 0) + (c.predicted || 0), prompt)} of ${number(prompt)} tokens promised`;
}

function outcome({ report: r }) {
  if (!r) return 'not reported yet';
  const found = r.cached_tokens !== undefined && r.prompt_tokens ? `, ${percentOf(r.cached_tokens, r.prompt_tokens)} found` : '';
  return `${outcomes[r.outcome] || 'reported'}${found}${r.ttft_ms ? `, first token after ${span(r.ttft_ms)}` : ''}`;
}

function inside(d) {
  const c = d.counterfactual;
  return [ranking(d.ranking, `Candidates of decision ${d.decision_id}`),
    c && h('p', { class: 'note' }, c.same ? `The shadow policy ${c.policy} would have sent it to the same member.` : `The shadow policy ${c.policy} would have sent it to ${c.member.pod}.`)].filter(Boolean);
}
