import { bar, h, slot } from './dom.js';
import { compact, number, percentOf, plural, span } from './format.js';
import { out, trusts } from './model.js';

// gain answers: does it work, what does it gain, why did a request go there.
export function gain() {
  const works = slot(h('section', { class: 'card answer', 'aria-label': 'Does it work?' }));
  const share = slot(h('section', { class: 'card answer', 'aria-label': 'What does it gain?' }));
  const load = slot(h('section', { class: 'card answer', 'aria-label': 'How busy is the fleet?' }));
  const element = h('div', { class: 'stack' },
    h('h1', { class: 'hidden' }, 'Gain'),
    h('div', { class: 'three' }, works.element, share.element, load.element));
  return {
    element,
    update(state) {
      const { sums: t, members } = state;
      const problems = wrong(state);
      works.show([problems, members.length, t.trust], () => [
        h('h2', { class: 'question' }, 'Does it work?'),
        h('p', { class: `figure ${problems.length ? 'look' : 'good'}` }, problems.length ? 'Look here' : 'Yes'),
        h('p', { class: 'then' }, problems[0] || `${plural(members.length, 'member')}, and what each one’s cache holds is known exactly.`),
        problems.length > 1 && h('p', { class: 'then' }, problems.slice(1).join(' ')),
        members.length > 0 && h('p', { class: 'then' }, h('a', { href: '#/truth' }, 'How far each cache state is believed')),
      ]);
      share.show([t.prompt, t.cached, Math.round(t.saved / 1000)], () => [
        h('h2', { class: 'question' }, 'What does it gain?'),
        h('p', { class: 'figure' }, percentOf(t.cached, t.prompt), ' ', h('small', null, 'of prompt tokens not computed')),
        t.prompt ? [
          bar([['fill', t.cached / t.prompt]], `${percentOf(t.cached, t.prompt)} of prompt tokens came from caches`),
          h('p', { class: 'then' }, `${compact(t.cached)} of ${compact(t.prompt)} tokens in ${plural(t.requests, 'reported request')} came from caches: about ${span(t.saved)} of engines’ prefill, at the speeds learned.`),
        ] : h('p', { class: 'then' }, 'No caller has reported an outcome yet. Proxies tell what engines found in their caches by Report.'),
      ]);
      load.show([t.running, t.waiting, state.decisions, t.out], () => [
        h('h2', { class: 'question' }, 'How busy is the fleet?'),
        h('p', { class: 'figure' }, number(t.running), ' ', h('small', null, `running, ${number(t.waiting)} waiting`)),
        h('p', { class: 'then' }, `${plural(state.decisions, 'decision')} since the scheduler started.${t.out ? ` ${plural(t.out, 'member')} out of picks.` : ''}`),
        h('p', { class: 'then' }, h('a', { href: '#/decisions' }, 'Why a request goes where it goes')),
      ]);
    },
  };
}

// wrong says in sentences what keeps the fleet from being known and used.
function wrong({ members, sums: t, ready, scheduler }) {
  const list = [];
  if (scheduler.nats_connected === false) list.push('NATS is not connected: answers stand on the last known state.');
  if (!ready) list.push(`The scheduler is not ready: ${scheduler.readiness}.`);
  if (members.length === 0) list.push('No member has announced itself: is an agent beside an engine, on this NATS and with this pool?');
  for (const trust of trusts.slice(1)) {
    if (t.trust[trust]) list.push(`${plural(t.trust[trust], 'member')} of ${number(members.length)} ${t.trust[trust] === 1 ? 'is' : 'are'} ${trust}.`);
  }
  const reasons = new Map();
  for (const m of members) if (m.ineligible) reasons.set(out(m), (reasons.get(out(m)) || 0) + 1);
  for (const [why, n] of reasons) list.push(`${plural(n, 'member')} out of picks: ${why}.`);
  return list;
}
