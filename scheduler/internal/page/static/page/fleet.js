import { attribute, bar, h, memberLink, prose, slot, text, trustMark, width } from './dom.js';
import { chart, lineKey } from './chart.js';
import { clock, compact, number, percent, percentOf, plural, span } from './format.js';
import { adviceOn, out, trusts } from './model.js';
import { recent } from './recent.js';

const rowHeight = 36;
const over = 6; // rows drawn beyond what is seen

// columns of the table. few: left out where there is little room.
const columns = [
  { key: 'name', title: 'Member', size: 'minmax(9rem, 2fr)', of: (m) => m.name, first: 'ascending' },
  { key: 'models', title: 'Model', size: 'minmax(6rem, 1.6fr)', of: (m) => m.models.join(', '), few: true, first: 'ascending' },
  { key: 'trust', title: 'Cache state', size: '8rem', of: (m) => trusts.indexOf(m.trust), few: true },
  { key: 'load', title: 'Load', about: 'requests running + waiting', size: '5rem', num: true, of: (m) => m.load, show: (m) => (m.running === undefined ? '–' : `${m.running} + ${m.waiting ?? 0}`) },
  { key: 'kv', title: 'KV use', about: 'part of the KV cache that requests use', size: 'minmax(6.5rem, 1fr)', gauge: (m) => m.kv, of: (m) => m.kv ?? -1 },
  { key: 'fill', title: 'Cache fill', about: 'part of the KV cache that holds reusable blocks', size: 'minmax(6.5rem, 1fr)', gauge: (m) => m.fill, of: (m) => m.fill ?? -1, few: true },
  { key: 'rate', title: 'Prefill', about: 'tokens per second', size: '6rem', num: true, of: (m) => m.rate ?? -1, show: (m) => (m.rate ? `${compact(Math.round(m.rate))}/s` : '–'), few: true },
  { key: 'reserved', title: 'Reserved', about: 'tokens on their way', size: '5.5rem', num: true, of: (m) => m.reserved, show: (m) => compact(m.reserved), few: true },
  { key: 'age', title: 'Heard', about: 'time since the last heartbeat', size: '5rem', num: true, of: (m) => m.age, show: (m) => span(m.age), few: true },
];

const shades = {
  load: ['load', 'requests running and waiting, against the busiest', (m, most) => (most ? m.load / most : 0), (m) => String(m.load)],
  kv: ['KV use', 'part of the KV cache that requests use', (m) => m.kv ?? 0, (m) => percent(m.kv)],
  fill: ['cache fill', 'part of the KV cache that holds reusable blocks', (m) => m.fill ?? 0, (m) => percent(m.fill)],
};

// kept while the page is open: what was chosen in the view.
const chosen = { words: '', model: '', role: '', trust: '', shade: 'load', sort: 'name', order: 'ascending' };

const field = (label, control, grow) => h('label', { class: grow ? 'field grow' : 'field' }, label, control);

function choice(key, label, changed) {
  const select = h('select', { onchange: () => { chosen[key] = select.value; changed(); } });
  let last;
  return {
    element: field(label, select),
    offer(list) { // [value, title]
      const now = JSON.stringify(list);
      if (now === last) return;
      last = now;
      select.replaceChildren(...list.map(([value, title]) => h('option', { value }, title)));
      select.value = list.some(([value]) => value === chosen[key]) ? chosen[key] : '';
      chosen[key] = select.value;
    },
  };
}

// fleet shows all members: a map, and a table of any length.
export function fleet() {
  let state;
  const redraw = () => state && view.update(state);
  const words = h('input', { type: 'search', autocomplete: 'off', spellcheck: 'false', placeholder: 'pod, address, reason …', value: chosen.words, oninput: () => { chosen.words = words.value; redraw(); } });
  const model = choice('model', 'Model', redraw);
  const role = choice('role', 'Role', redraw);
  const trust = choice('trust', 'Cache state', redraw);
  const shade = choice('shade', 'Shade by', redraw);
  shade.offer(Object.entries(shades).map(([key, [title]]) => [key, title]));
  const count = h('p', { class: 'note', role: 'status' });
  const map = fleetMap();
  const list = table(redraw);
  const none = h('p', { class: 'empty', hidden: true });
  const mapCard = h('section', { class: 'card', 'aria-label': 'Map of the fleet' }, h('div', { class: 'head' }, h('h2', null, 'Map'), shade.element), map.element);
  const listCard = h('section', { class: 'card', 'aria-label': 'Table of members' }, list.element);
  const view = {
    element: h('div', { class: 'stack' },
      h('h1', null, 'Fleet'),
      h('div', { class: 'filters' }, field('Find', words, true), model.element, role.element, trust.element),
      count, none, mapCard, listCard),
    update(now) {
      state = now;
      const all = state.members;
      model.offer([['', 'all models'], ...[...new Set(all.flatMap((m) => [...m.models, ...m.adapters]))].sort().map((name) => [name, name])]);
      const roles = [...new Set(all.map((m) => m.role))].filter(Boolean).sort();
      role.offer([['', 'all roles'], ...roles.map((name) => [name, name])]);
      role.element.hidden = roles.length === 0;
      trust.offer([['', 'all'], ...trusts.map((name) => [name, name]), ['out', 'out of picks']]);
      const sought = chosen.words.trim().toLowerCase();
      const found = all.filter((m) => (!chosen.model || m.models.includes(chosen.model) || m.adapters.includes(chosen.model))
        && (!chosen.role || m.role === chosen.role)
        && (!chosen.trust || (chosen.trust === 'out' ? m.ineligible : m.trust === chosen.trust))
        && (!sought || `${m.id} ${m.pod} ${m.address} ${m.why} ${m.warning} ${out(m)}`.toLowerCase().includes(sought)));
      const column = columns.find((c) => c.key === chosen.sort);
      const sign = chosen.order === 'ascending' ? 1 : -1;
      found.sort((a, b) => {
        const x = column.of(a);
        const y = column.of(b);
        return sign * (typeof x === 'string' ? x.localeCompare(y, 'en', { numeric: true }) : x - y) || a.id.localeCompare(b.id, 'en', { numeric: true });
      });
      text(count, found.length === all.length ? plural(all.length, 'member') : `${number(found.length)} of ${plural(all.length, 'member')}`);
      none.hidden = found.length > 0;
      text(none, all.length ? 'No member fits what is sought.' : 'No member has announced itself. An agent beside each engine does so over NATS; kvscout doctor says what is missing.');
      mapCard.hidden = listCard.hidden = found.length === 0;
      map.show(found);
      list.show(found);
    },
    close() { list.close(); },
  };
  return view;
}

function fleetMap() {
  const cells = [];
  const grid = h('div', { class: 'map', 'aria-hidden': 'true', onclick: (e) => {
    const cell = e.target.closest('i');
    if (cell) location.hash = `#/fleet/${encodeURIComponent(cell.dataset.id)}`;
  } });
  const low = h('span', null, '0');
  const high = h('span');
  const about = h('p', { class: 'note' });
  const scale = h('div', { class: 'head' }, about, h('span', { class: 'scale' }, low, h('span', { class: 'ramp' }), high));
  return {
    element: h('div', { class: 'stack' }, grid, scale),
    show(members) {
      const [, meaning, share, label] = shades[chosen.shade];
      const most = members.reduce((max, m) => Math.max(max, m.load), 0);
      text(about, `One square is one member, shaded by ${meaning}. A red frame: out of picks.`);
      text(high, chosen.shade === 'load' ? String(Math.max(most, 1)) : '100 %');
      const big = members.length <= 48;
      grid.style.setProperty('--cell', big ? '4rem' : members.length <= 300 ? '1.5rem' : '1rem');
      while (cells.length > members.length) cells.pop().remove();
      while (cells.length < members.length) {
        const cell = h('i');
        cells.push(cell);
        grid.append(cell);
      }
      members.forEach((m, i) => {
        const cell = cells[i];
        const of = Math.round(100 * Math.max(0, Math.min(1, share(m, most))));
        if (cell.dataset.of !== String(of)) {
          cell.dataset.of = of;
          cell.style.background = `color-mix(in oklab, var(--accent) ${of}%, var(--sunk))`;
          cell.style.color = of > 45 ? 'var(--on-accent)' : 'var(--ink)';
        }
        cell.dataset.id = m.id;
        cell.toggleAttribute('data-off', Boolean(m.ineligible));
        text(cell, big ? label(m) : '');
        attribute(cell, 'title', `${m.name}: ${label(m)}${m.ineligible ? `, ${out(m)}` : ''}`);
      });
    },
  };
}

const kinds = (c) => [c.num && 'num', c.few && 'few', c.gauge && 'wideset'].filter(Boolean).join(' ');

// table of any length: only rows that are seen, and a few around them, exist.
function table(changed) {
  let members = [];
  const narrow = matchMedia('(max-width: 40rem)');
  const heads = h('div', { class: 'row heads', role: 'row' }, columns.map((c) => h('div', { role: 'columnheader', class: kinds(c), 'data-key': c.key, title: c.about },
    h('button', { type: 'button', onclick: () => {
      if (chosen.sort === c.key) chosen.order = chosen.order === 'ascending' ? 'descending' : 'ascending';
      else Object.assign(chosen, { sort: c.key, order: c.first || 'descending' });
      changed();
    } }, c.title))));
  const body = h('div', { class: 'body', role: 'rowgroup' });
  const element = h('div', { class: 'grid', role: 'table', 'aria-label': 'Members' }, h('div', { role: 'rowgroup', class: 'heads' }, heads), body);
  const rows = new Map(); // by place

  const shape = () => {
    const sizes = columns.filter((c) => !(narrow.matches && c.few)).map((c) => c.size).join(' ');
    element.style.setProperty('--sizes', sizes);
  };

  function row() {
    const cells = columns.map((c) => {
      const cell = h('div', { role: 'cell', class: kinds(c) });
      if (c.key === 'name') cell.append(h('a'));
      if (c.key === 'trust') cell.append(h('span', { class: 'trust' }));
      if (c.gauge) cell.append(h('div', { class: 'gauge' }, h('div', { class: 'bar thin' }, h('i', { 'data-part': 'fill' })), h('span', { class: 'num' })));
      return cell;
    });
    return { element: h('div', { class: 'row', role: 'row' }, cells), cells };
  }

  function write(r, m, place) {
    r.element.style.transform = `translateY(${place * rowHeight}px)`;
    attribute(r.element, 'aria-rowindex', String(place + 2));
    columns.forEach((c, i) => {
      const cell = r.cells[i];
      if (c.key === 'name') {
        attribute(cell.firstChild, 'href', `#/fleet/${encodeURIComponent(m.id)}`);
        attribute(cell.firstChild, 'title', m.id);
        text(cell.firstChild, m.name);
      } else if (c.key === 'trust') {
        attribute(cell.firstChild, 'data-trust', m.trust);
        attribute(cell, 'title', [m.why, out(m)].filter(Boolean).join('; '));
        text(cell.firstChild, m.trust);
      } else if (c.gauge) {
        width(cell.firstChild.firstChild.firstChild, c.gauge(m) ?? 0);
        text(cell.firstChild.lastChild, percent(c.gauge(m)));
      } else {
        attribute(cell, 'title', String(c.show ? c.show(m) : c.of(m)));
        text(cell, c.show ? c.show(m) : c.of(m));
      }
    });
  }

  function draw() {
    const top = body.getBoundingClientRect().top;
    const from = Math.max(0, Math.floor(-top / rowHeight) - over);
    const to = Math.min(members.length, Math.ceil((innerHeight - top) / rowHeight) + over);
    const free = [];
    for (const [place, r] of rows) {
      if (place >= from && place < to) continue;
      if (r.element.contains(document.activeElement) && place < members.length) continue; // focus stays where it is
      rows.delete(place);
      free.push(r);
    }
    for (let place = from; place < to; place += 1) {
      if (rows.has(place)) continue;
      const r = free.pop() || row();
      rows.set(place, r);
      if (!r.element.isConnected) body.append(r.element);
    }
    for (const r of free) r.element.remove();
    for (const [place, r] of rows) write(r, members[place], place);
  }

  let asked = false;
  const soon = () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; draw(); });
  };
  addEventListener('scroll', soon, { passive: true });
  addEventListener('resize', soon, { passive: true });
  narrow.addEventListener('change', shape);
  shape();
  return {
    element,
    show(list) {
      members = list;
      body.style.height = `${members.length * rowHeight}px`;
      attribute(element, 'aria-rowcount', String(members.length + 1));
      for (const head of heads.children) attribute(head, 'aria-sort', head.dataset.key === chosen.sort ? chosen.order : 'none');
      draw();
    },
    close() {
      removeEventListener('scroll', soon);
      removeEventListener('resize', soon);
      narrow.removeEventListener('change', shape);
    },
  };
}

const lanes = [['gpu', 'GPU'], ['host', 'GPU or host memory'], ['disk', 'GPU, host memory or disk']];

// one shows one member.
export function one(id) {
  const part = () => slot(h('section', { class: 'card' }));
  const title = slot(h('div'));
  const state = part();
  const load = part();
  const caches = part();
  const speed = part();
  const reports = part();
  const facts = part();
  const lately = recent(id, 10);
  return {
    close: () => lately.close(),
    element: h('div', { class: 'stack' }, title.element, state.element, h('div', { class: 'pair' }, load.element, caches.element), h('div', { class: 'pair' }, speed.element, reports.element), facts.element,
      h('section', { class: 'card' }, h('h2', null, 'Its last decisions'), lately.element)),
    update({ byId }) {
      const m = byId.get(id);
      title.show([m?.name, m?.address, Boolean(m)], () => [
        h('p', { class: 'note' }, h('a', { href: '#/fleet' }, 'Fleet')), h('h1', null, m ? m.name : id),
        h('p', { class: 'lead' }, m ? `${m.models.join(', ')}${m.address ? ` at ${m.address}` : ', without an address'}` : 'This member is not there, or no longer.'),
      ]);
      for (const card of [state, load, caches, speed, reports, facts]) card.element.hidden = !m;
      if (!m) return;
      state.show([m.trust, m.why, m.ineligible, m.warning, adviceOn(m.why)], () => [
        h('h2', null, 'What is believed of its cache'), h('p', null, trustMark(m.trust)),
        m.why && h('p', null, m.why), m.why && h('p', { class: 'advice' }, prose(adviceOn(m.why))),
        m.ineligible && h('p', { class: 'bad' }, `Out of picks: ${out(m)}.`), m.warning && h('p', { class: 'look' }, m.warning),
      ]);
      load.show([m.running, m.waiting, m.kv, m.reserved, m.reservedRequests], () => [
        h('h2', null, 'Load'),
        h('dl', { class: 'facts' },
          h('dt', null, 'Running'), h('dd', null, m.running ?? 'not known'), h('dt', null, 'Waiting'), h('dd', null, m.waiting ?? 'not known'),
          h('dt', null, 'On their way'), h('dd', null, `${plural(m.reservedRequests, 'request')}, ${number(m.reserved)} tokens reserved`),
          h('dt', null, 'KV use'), h('dd', null, percent(m.kv), bar([['fill', m.kv || 0]], `KV use ${percent(m.kv)}`, true))),
      ]);
      caches.show([m.held, m.capacity], () => [
        h('h2', null, 'Cached blocks'),
        h('dl', { class: 'facts' }, lanes.map(([name, label], i) => [h('dt', null, label),
          h('dd', null, `${number(m.held[i])}${i === 0 && m.capacity ? ` of ${number(m.capacity)} (${percentOf(m.held[0], m.capacity)})` : ''}`,
            bar([[name, m.held[i] / Math.max(m.capacity, ...m.held, 1)]], `${number(m.held[i])} blocks`, true))])),
        h('p', { class: 'note' }, m.blockSize ? `A block is ${m.blockSize} tokens.` : 'The block size is not known yet.'),
      ]);
      const s = m.speed || {};
      speed.show([s.request_ms, s.token_ms, s.context_ms, s.learned].map((v) => (typeof v === 'number' ? Number(v.toPrecision(3)) : v)), () => [
        h('h2', null, 'Prefill time by prompt length'), fit(s),
        h('p', { class: 'note' }, `${s.learned ? 'Learned from this member’s own counts' : 'Not learned yet: the median of its model’s other members, or a guess'}: ${span(s.request_ms)} a request and ${(1000 * s.token_ms).toFixed(0)} µs a token. Each decoding step takes ${span(s.step_ms)} and ${(1000 * (s.step_request_ms || 0)).toFixed(0)} µs for each running request.`),
      ]);
      const r = m.reported;
      reports.show(r, () => [
        h('h2', null, 'What was reported'),
        r.requests === 0 ? h('p', { class: 'empty' }, 'Nothing was reported of it yet.') : h('dl', { class: 'facts' },
          h('dt', null, 'Requests'), h('dd', null, number(r.requests)), h('dt', null, 'Prompt tokens'), h('dd', null, number(r.prompt)),
          h('dt', null, 'Found cached'), h('dd', null, `${number(r.cached)} (${percentOf(r.cached, r.prompt)})`), h('dt', null, 'Promised'), h('dd', null, number(r.predicted))),
      ]);
      facts.show([m.models, m.adapters, m.engine, m.agent, m.labels, m.began, m.sequence, m.batches, m.address], () => [
        h('h2', null, 'Facts'),
        h('dl', { class: 'facts' },
          h('dt', null, 'Member'), h('dd', { class: 'mono' }, m.id), h('dt', null, 'Address'), h('dd', { class: 'mono' }, m.address || 'none'),
          h('dt', null, 'Models'), h('dd', null, m.models.join(', ')), m.adapters.length > 0 && [h('dt', null, 'Adapters'), h('dd', null, m.adapters.join(', '))],
          h('dt', null, 'Engine'), h('dd', null, `vLLM ${m.engine}`), h('dt', null, 'Agent'), h('dd', null, m.agent),
          h('dt', null, 'Incarnation'), h('dd', null, m.began > 1e12 ? `since ${clock(m.began)}` : String(m.began)),
          h('dt', null, 'Sequence'), h('dd', null, `${number(m.sequence)} changes, after ${number(m.batches)} batches of the engine`),
          Object.entries(m.labels).map(([name, value]) => [h('dt', { class: 'mono' }, name), h('dd', { class: 'mono' }, value)])),
      ]);
    },
  };
}

// fit draws the learned prefill time: nothing cached, and half of it.
function fit(s) {
  const longest = 32768;
  const time = (n, cached) => s.request_ms + s.token_ms * n + s.context_ms * n * (cached + n / 2);
  const over = (share) => Array.from({ length: 33 }, (_, i) => (i * longest) / 32).map((n) => [n, time(n * (1 - share), n * share)]);
  return [
    chart({ label: `Prefill of ${number(longest)} tokens takes ${span(time(longest, 0))}, with half of them cached ${span(time(longest / 2, longest / 2))}`,
      series: [{ kind: 'soft', points: over(0) }, { kind: 'accent', points: over(0.5) }], y: (v) => (v ? span(v) : '0'), x: (v) => (v ? `${number(v)} tokens` : '0') }),
    h('ul', { class: 'legend' }, h('li', null, lineKey('soft'), 'nothing cached'), h('li', null, lineKey('accent'), 'half of the prompt cached')),
  ];
}
