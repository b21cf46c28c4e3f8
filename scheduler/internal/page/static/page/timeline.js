import { asked } from './asked.js';
import { h, memberLink, prose, slot } from './dom.js';
import { clock, plural } from './format.js';
import { adviceOn } from './model.js';

const kinds = {
  members: ['members that come, go or begin anew', ['joined', 'left', 'there', 'incarnation']],
  trust: ['trust and its reasons', ['trust', 'reason']],
  picks: ['who takes part in picks, and warnings', ['eligible', 'warning']],
  facts: ['addresses, models, versions', ['address', 'models', 'adapters', 'engine', 'agent']],
  scheduler: ['the scheduler and its settings', null],
};
const kindOf = (what) => Object.keys(kinds).find((k) => kinds[k][1]?.includes(what)) || 'scheduler';
const titles = { trust: 'trust', incarnation: 'new incarnation', eligible: 'takes part in picks', joined: 'joined', left: 'left', scheduler: 'readiness' };

let chosen = '';

// timeline is what changed lately, the newest first.
export function timeline() {
  const list = slot(h('section', { class: 'card', 'aria-label': 'Changes' }));
  let last;
  const select = h('select', { onchange: () => { chosen = select.value; show(); } }, h('option', { value: '' }, 'everything'), Object.entries(kinds).map(([key, [title]]) => h('option', { value: key }, title)));
  select.value = chosen;
  const source = asked('v1/changes?max_changes=500', 2000, () => show());
  function show() {
    const changes = (source.answer?.changes || []).filter((c) => !chosen || kindOf(c.what) === chosen);
    list.show([source.failed, source.answer === undefined, chosen, changes, adviceOn('just announced')], () => {
      if (source.failed) return h('p', { class: 'error' }, source.failed);
      if (!source.answer) return h('p', { class: 'loading' }, 'Reading…');
      if (changes.length === 0) return h('p', { class: 'empty' }, chosen ? 'Nothing of this kind has changed since the scheduler started.' : 'Nothing has changed since the scheduler started.');
      return [
        h('p', { class: 'note' }, `${plural(changes.length, 'change')}, the newest first.`),
        h('ol', { class: 'items changes' }, changes.map((c) => h('li', { 'data-kind': kindOf(c.what) },
          h('time', { datetime: new Date(Number(c.time_ms)).toISOString() }, clock(Number(c.time_ms))),
          h('div', null,
            h('p', null, c.member_id ? memberLink(c.member_id, nameOf(c.member_id, last)) : 'Scheduler', ' ', h('b', null, titles[c.what] || c.what), ' ', between(c)),
            c.why && h('p', { class: 'advice' }, c.why),
            c.why && adviceOn(c.why) && h('p', { class: 'advice' }, 'To do: ', prose(adviceOn(c.why))))))),
      ];
    });
  }
  return {
    element: h('div', { class: 'stack' },
      h('div', { class: 'head' }, h('h1', null, 'What changed?'), h('label', { class: 'field' }, 'Show', select)), list.element),
    update(state) { last = state; },
    close: () => source.stop(),
  };
}

const nameOf = (id, state) => state?.byId.get(id)?.name || id.split('_').slice(1, -1).join('_') || id;

const between = (c) => [c.from, c.to].filter(Boolean).join(' → ');
