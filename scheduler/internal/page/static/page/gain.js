import { ask } from './api.js';
import { bar, h, prose, slot } from './dom.js';
import { compact, number, percentOf, plural, span } from './format.js';
import { adviceOn, out, trusts } from './model.js';

const every = 5000; // ms between two looks at the books

// kept while the page is open: which steps are unfolded.
const unfolded = new Set();

// gain answers: does it work, what does it gain, how busy is the fleet; and where
// what could have been gained was lost.
export function gain() {
  const card = (label, kind = 'card answer') => slot(h('section', { class: kind, 'aria-label': label }));
  const works = card('Does it work?');
  const share = card('What does it gain?');
  const load = card('How busy is the fleet?');
  const ladder = card('From prompts to hits', 'card');
  const lost = card('Where the others were lost', 'card');
  let books;
  let failed = '';
  let last;
  const view = {
    element: h('div', { class: 'stack' },
      h('h1', { class: 'hidden' }, 'Gain'),
      h('div', { class: 'three' }, works.element, share.element, load.element),
      h('div', { class: 'pair' }, ladder.element, lost.element)),
    update(state) {
      last = state;
      const { sums: t, members } = state;
      const problems = wrong(state);
      works.show([problems, members.length, t.trust], () => [
        h('h2', { class: 'question' }, 'Does it work?'),
        h('p', { class: `figure ${problems.length ? 'look' : 'good'}` }, problems.length ? 'Look here' : 'Yes'),
        h('p', { class: 'then' }, problems[0] || `${plural(members.length, 'member')}, and what each one’s cache holds is known exactly.`),
        problems.length > 1 && h('p', { class: 'then' }, problems.slice(1).join(' ')),
        members.length > 0 && h('p', { class: 'then' }, h('a', { href: '#/truth' }, 'How far each cache state is believed')),
      ]);
      share.show([books?.used, books?.booked, books?.least, t.cached, Math.round(t.saved / 1000)], () => [h('h2', { class: 'question' }, 'What does it gain?'), gained(books, t)]);
      load.show([t.running, t.waiting, state.decisions, t.out], () => [
        h('h2', { class: 'question' }, 'How busy is the fleet?'),
        h('p', { class: 'figure' }, number(t.running), ' ', h('small', null, `running, ${number(t.waiting)} waiting`)),
        h('p', { class: 'then' }, `${plural(state.decisions, 'decision')} since the scheduler started.${t.out ? ` ${plural(t.out, 'member')} out of picks.` : ''}`),
        h('p', { class: 'then' }, h('a', { href: '#/decisions' }, 'Why a request goes where it goes')),
      ]);
      const known = adviceOn('LOSS_EVICTED') !== '';
      ladder.show([books, failed], () => [h('h2', null, 'From prompts to hits'), failed ? h('p', { class: 'error' }, failed) : steps(books)]);
      lost.show([books, failed, known], () => [h('h2', null, 'Where the others were lost'), failed ? h('p', { class: 'empty' }, '–') : losses(books)]);
    },
    close() { clearInterval(timer); },
  };
  const look = async () => {
    try {
      books = read(await ask('v1/books'));
      failed = '';
    } catch (e) {
      failed = e.message;
    }
    if (last) view.update(last);
  };
  const timer = setInterval(look, every);
  look();
  return view;
}

// read the books as numbers.
function read(b) {
  const p = b.picked || {};
  const n = (v) => Number(v || 0);
  return {
    prompt: n(p.prompt_tokens), ideal: n(p.ideal_tokens), feasible: n(p.feasible_tokens), routed: n(p.routed_tokens), least: n(p.least_load_tokens),
    requests: n(b.booked_requests), booked: n(b.booked_prompt_tokens), used: n(b.used_tokens),
    lost: (b.lost || []).map((l) => ({ cause: l.cause, tokens: n(l.tokens), why: l.explanation })),
    evicted: (b.evicted || []).map((e) => ({ within: e.used_within_ms, pools: e.kept_by_pools, unknown: e.pool_unknown, tokens: n(e.tokens) })),
    diverted: n(b.diverted_requests), divertedMS: n(b.diverted_ms),
  };
}

function gained(books, t) {
  const used = books?.booked ? books.used : t.cached;
  const of = books?.booked ? books.booked : t.prompt;
  if (!of) {
    return [h('p', { class: 'figure' }, '–'),
      h('p', { class: 'then' }, 'No caller has reported an outcome yet. Proxies tell what engines found in their caches by Report.')];
  }
  return [
    h('p', { class: 'figure' }, percentOf(used, of), ' ', h('small', null, 'of prompt tokens not computed')),
    bar([['fill', used / of]], `${percentOf(used, of)} of prompt tokens came from caches`),
    h('p', { class: 'then' }, `${compact(used)} of ${compact(of)} tokens came from caches: about ${span(t.saved)} of engines’ prefill, at the speeds learned.`,
      books?.prompt > 0 && ` Where the fewest requests were, prompts would have found ${percentOf(books.least, books.prompt)}; where they went, ${percentOf(books.routed, books.prompt)}.`),
  ];
}

// steps from prompts to what engines found, each with what stands between it and
// the one before.
function steps(b) {
  if (!b) return h('p', { class: 'loading' }, 'Reading the books…');
  if (b.prompt === 0) return h('p', { class: 'empty' }, 'No request with tokens was picked yet.');
  const list = [
    ['prompt', 'Prompts', b.prompt, b.prompt, 'fill', 'Tokens of all prompts that were picked since the scheduler started.'],
    ['ideal', 'Any member held', b.ideal, b.prompt, 'fill', `${lack(b.prompt, b.ideal)} were in no cache: new, or evicted. Larger caches keep more; what is new nobody has.`],
    ['feasible', 'A candidate held', b.feasible, b.prompt, 'fill', `${lack(b.ideal, b.feasible)} were only where the request could not go: members that fail, sleep, are silent, or were excluded. Mend those.`],
    ['routed', 'The picked member held', b.routed, b.prompt, 'fill', `${lack(b.feasible, b.routed)} were given up because their holder would have taken longer${b.diverted ? `: ${plural(b.diverted, 'request')} went elsewhere, and were spared ${span(b.divertedMS)} in all` : ''}. More engines make that rarer.`],
    ['least', 'Fewest requests would have had', b.least, b.prompt, 'wait', 'What the member with the fewest requests held at the same moments: where a balancer that knows load alone would have gone. The caches are as this policy has filled them, not as that one would have.'],
  ];
  if (b.booked) list.push(['used', 'Engines found', b.used, b.booked, 'good', `What engines counted as cached, of the ${compact(b.booked)} prompt tokens of ${plural(b.requests, 'request')} that were reported. It may be more than was held when they were picked: requests before them were still being computed.`]);
  return h('div', { class: 'steps' }, list.map(([key, title, tokens, of, part, about]) => {
    const step = h('details', { open: unfolded.has(key), ontoggle: () => { if (step.open) unfolded.add(key); else unfolded.delete(key); } },
      h('summary', null, h('span', null, title), h('span', { class: 'num' }, key === 'prompt' ? compact(tokens) : percentOf(tokens, of)),
        bar([[part, tokens / of]], `${number(tokens)} of ${number(of)} tokens`)),
      h('p', { class: 'advice' }, about));
    return step;
  }));
}

const lack = (from, to) => `${compact(from - to)} tokens`;

function losses(b) {
  if (!b) return h('p', { class: 'loading' }, 'Reading the books…');
  if (b.booked === 0) return h('p', { class: 'empty' }, 'No request was reported with its engine’s own counts yet. Every prompt token is then booked: used, or lost to one cause.');
  const most = Math.max(...b.lost.map((l) => l.tokens), 1);
  return [
    h('p', { class: 'note' }, `Of ${compact(b.booked)} prompt tokens in ${plural(b.requests, 'reported request')}, ${compact(b.used)} were used. The others:`),
    h('div', { class: 'steps' }, b.lost.map((l) => {
      const key = l.cause;
      const name = l.cause.replace('LOSS_', '').toLowerCase();
      const step = h('details', { open: unfolded.has(key), ontoggle: () => { if (step.open) unfolded.add(key); else unfolded.delete(key); } },
        h('summary', null, h('span', null, name), h('span', { class: 'num' }, `${compact(l.tokens)} · ${percentOf(l.tokens, b.booked)}`),
          bar([['miss', l.tokens / most]], `${number(l.tokens)} tokens lost`, true)),
        h('p', { class: 'advice' }, `${l.why[0].toUpperCase()}${l.why.slice(1)}.`),
        adviceOn(key) && h('p', { class: 'advice' }, 'To do: ', prose(adviceOn(key)), '.', key === 'LOSS_UNTRUSTED' && [' ', h('a', { href: '#/truth' }, 'Truth')]),
        key === 'LOSS_EVICTED' && b.evicted.length > 0 && evicted(b.evicted));
      return step;
    })),
  ];
}

function evicted(list) {
  return h('table', { class: 'brief' },
    h('caption', null, 'What would have kept the evicted'),
    h('thead', null, h('tr', null, h('th', { scope: 'col' }, 'Last used'), h('th', { scope: 'col' }, 'Kept by a cache of'), h('th', { scope: 'col', class: 'num' }, 'Tokens'))),
    h('tbody', null, list.map((e) => h('tr', null,
      h('td', null, e.within === undefined ? 'longer ago' : `within ${span(e.within)}`),
      h('td', null, e.unknown ? 'not known' : e.pools === undefined ? 'more than that' : `${number(e.pools)} × the GPU’s pool`),
      h('td', { class: 'num' }, compact(e.tokens))))));
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
