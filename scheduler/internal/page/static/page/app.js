// The page: its state, which view is shown, and when it is drawn.

import { follow } from './api.js';
import { h, attribute, text } from './dom.js';
import { span } from './format.js';
import { loadAdvice, member, sums } from './model.js';
import { gain } from './gain.js';
import { truth } from './truth.js';
import { fleet, one } from './fleet.js';
import { prefixes } from './prefixes.js';
import { decisions } from './decisions.js';
import { timeline } from './timeline.js';

const views = [
  { path: '', title: 'Gain', make: gain },
  { path: 'truth', title: 'Truth', make: truth },
  { path: 'fleet', title: 'Fleet', make: fleet, detail: one },
  { path: 'prefixes', title: 'Prefixes', make: prefixes },
  { path: 'decisions', title: 'Decisions', make: decisions, detail: decisions },
  { path: 'timeline', title: 'Timeline', make: timeline },
];

// state is what views draw. members are undefined until the first answer.
const state = {
  members: undefined, byId: new Map(), sums: undefined, scheduler: {}, ready: false, decisions: 0,
  seen: 0, mode: 'connecting', lost: '',
};

const element = (id) => document.getElementById(id);
let view;
let asked = false;

// draw soon: however much comes until the next frame is drawn at once.
function draw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    head();
    if (state.members) view?.update?.(state);
    else if (state.mode === 'lost') failed();
  });
}

function head() {
  const { scheduler } = state;
  text(element('about'), scheduler.name ? [scheduler.name, scheduler.release, scheduler.pool && `pool ${scheduler.pool}`].filter(Boolean).join(' · ') : '');
  const live = element('live');
  attribute(live, 'data-mode', state.mode);
  text(live, { live: 'live', polling: 'polling', connecting: 'connecting' }[state.mode] ?? `no answer${state.seen ? ` for ${span(1000 * Math.round((Date.now() - state.seen) / 1000))}` : ''}`);
  live.title = state.lost;
}

function failed() {
  element('main').replaceChildren(h('div', { class: 'empty', role: 'alert' },
    h('h1', null, 'The scheduler does not answer'), h('p', { class: 'lead' }, `${state.lost}. The page goes on trying.`)));
  view = undefined;
  shown = undefined;
}

let shown;

// route shows the view that the address names.
function route() {
  const [path, ...rest] = location.hash.replace(/^#\/?/, '').split('/');
  let name = rest.join('/');
  try { name = decodeURIComponent(name); } catch { /* as it is */ }
  const found = views.find((v) => v.path === path) || views[0];
  const moved = shown !== undefined;
  shown = location.hash;
  for (const link of document.querySelectorAll('nav a')) {
    if (link.dataset.path === found.path) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  view?.close?.();
  view = name && found.detail ? found.detail(name) : found.make();
  document.title = `${found.title} · kvscout`;
  const main = element('main');
  main.replaceChildren(view.element);
  if (moved) {
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
  if (state.members) view.update?.(state);
}

function seen(answer, mode) {
  state.members = answer.members.map(member);
  state.byId = new Map(state.members.map((m) => [m.id, m]));
  state.sums = sums(state.members);
  Object.assign(state, { scheduler: answer.scheduler || {}, ready: answer.ready, decisions: Number(answer.decisions), seen: Date.now(), mode, lost: '' });
  if (shown === undefined) route();
  draw();
}

function lost(why) {
  Object.assign(state, { mode: 'lost', lost: why });
  draw();
}

const themes = ['system', 'light', 'dark'];

function theme(name) {
  if (name === 'system') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  text(element('theme'), `Theme: ${name}`);
}

function remembered() {
  try { return themes.includes(localStorage.theme) ? localStorage.theme : 'system'; } catch { return 'system'; }
}

let chosen = remembered();
theme(chosen);
element('theme').addEventListener('click', () => {
  chosen = themes[(themes.indexOf(chosen) + 1) % themes.length];
  theme(chosen);
  try { localStorage.theme = chosen; } catch { /* for this time only */ }
});
element('views').append(...views.map((v) => h('li', null, h('a', { href: `#/${v.path}`, 'data-path': v.path }, v.title))));
document.querySelector('.skip').addEventListener('click', (e) => { // the address names the view
  e.preventDefault();
  element('main').focus();
});
addEventListener('hashchange', route);
loadAdvice().then(draw);
follow(seen, lost);
setInterval(draw, 1000);
