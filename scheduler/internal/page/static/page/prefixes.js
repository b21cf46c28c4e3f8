import { asked } from './asked.js';
import { h, memberLink, slot } from './dom.js';
import { compact, number, plural, span } from './format.js';

const most = 24; // members of the heat map

// prefixes are the beginnings that prompts share, what they are worth, and where
// they lie.
export function prefixes() {
  const list = slot(h('section', { class: 'card', 'aria-label': 'Shared beginnings' }));
  const map = slot(h('section', { class: 'card', 'aria-label': 'Where they lie' }));
  const source = asked('v1/prefixes', 5000, () => show());
  function show() {
    const found = (source.answer?.prefixes || []).map((p) => ({ ...p, hex: BigInt(p.key || 0).toString(16).padStart(16, '0') }));
    map.element.hidden = Boolean(source.failed) || found.length === 0;
    list.show([source.failed, source.answer], () => {
      if (source.failed) return h('p', { class: 'error' }, source.failed);
      if (!source.answer) return h('p', { class: 'loading' }, 'Reading…');
      if (found.length === 0) return h('p', { class: 'empty' }, 'No beginning is shared yet: one is followed when two prompts have gone on behind it, each in its own way.');
      return h('div', { class: 'wide', tabindex: 0, role: 'region', 'aria-label': 'Table of shared beginnings' }, h('table', null, h('caption', { class: 'hidden' }, 'Shared beginnings'),
        h('thead', null, h('tr', null, h('th', { scope: 'col' }, 'Key'), h('th', { scope: 'col', class: 'few' }, 'Model'), h('th', { scope: 'col', class: 'num' }, 'Tokens'), h('th', { scope: 'col', class: 'num' }, 'Hits'),
          h('th', { scope: 'col', class: 'num' }, 'Worth'), h('th', { scope: 'col', class: 'num' }, 'Holders'), h('th', { scope: 'col', class: 'num few' }, 'Last used'))),
        h('tbody', null, found.map((p) => h('tr', null, h('th', { scope: 'row', class: 'mono' }, p.hex), h('td', { class: 'few' }, p.model), h('td', { class: 'num' }, number(p.tokens)), h('td', { class: 'num' }, number(p.hits)),
          h('td', { class: 'num' }, compact(p.tokens * p.hits)), h('td', { class: 'num' }, number(p.holder_count)), h('td', { class: 'num few' }, `${span(p.used_age_ms)} ago`))))));
    });
    map.show(found.map((p) => [p.hex, p.holders.map((x) => x.member.id)]), () => heat(found));
  }
  return {
    element: h('div', { class: 'stack' }, h('div', null, h('h1', null, 'What do prompts share?'),
      h('p', { class: 'lead' }, 'Beginnings that prompts have in common, by the key of their last block. Worth is tokens times hits: what need not have been computed again.')), list.element, map.element),
    close: () => source.stop(),
  };
}

// heat shows which members hold which beginnings.
function heat(found) {
  const counts = new Map();
  for (const p of found) for (const { member } of p.holders) counts.set(member.id, { member, n: (counts.get(member.id)?.n || 0) + 1 });
  const members = [...counts.values()].sort((a, b) => b.n - a.n || a.member.id.localeCompare(b.member.id, 'en', { numeric: true })).slice(0, most).map((x) => x.member);
  return [
    h('h2', null, 'Where they lie'),
    members.length === 0 ? h('p', { class: 'empty' }, 'No member holds any of them now.') : [
      h('div', { class: 'wide', tabindex: 0, role: 'region', 'aria-label': 'Which member holds which beginning' }, h('table', { class: 'heat' }, h('caption', { class: 'hidden' }, 'Which member holds which beginning'),
        h('thead', null, h('tr', null, h('th', { scope: 'col' }, 'Member'), found.map((p) => h('th', { scope: 'col', title: p.hex }, h('span', { class: 'mono' }, p.hex.slice(0, 4)))))),
        h('tbody', null, members.map((m) => h('tr', null, h('th', { scope: 'row' }, memberLink(m.id, m.pod)),
          found.map((p) => {
            const held = p.holders.some((x) => x.member.id === m.id);
            return h('td', { 'data-held': String(held) }, h('span', { class: 'hidden' }, held ? 'holds it' : 'does not'));
          })))))),
      h('p', { class: 'note' }, `A filled square: the member holds the whole beginning.${counts.size > most ? ` ${plural(counts.size - most, 'member')} with fewer are left out.` : ''}`),
    ],
  ];
}
