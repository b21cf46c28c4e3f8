import { ask } from './api.js';
import { h, slot } from './dom.js';
import { number, span } from './format.js';
import { ranking } from './ranking.js';
import { recent } from './recent.js';

// kept while the page is open: what was asked.
const asked = { model: '', as: 'auto', prompt: '', compare: '', id: '', tenant: '' };

// base64 of a text as UTF-8.
function base64(words) {
  let bytes = '';
  for (const byte of new TextEncoder().encode(words)) bytes += String.fromCharCode(byte);
  return btoa(bytes);
}

// question makes a request of what was pasted: a body, token ids, or the text of
// a prompt.
export function question({ model, as, prompt }) {
  let value;
  try { value = JSON.parse(prompt); } catch { /* it is text, or wrong */ }
  const ids = Array.isArray(value) && value.length > 0 && value.every((id) => Number.isInteger(id) && id >= 0 && id < 2 ** 32);
  const body = value !== null && typeof value === 'object' && !Array.isArray(value);
  const kind = as === 'auto' ? (body ? 'body' : ids ? 'tokens' : 'text') : as;
  if (kind === 'tokens' && !ids) throw new Error('Token ids are a JSON list of whole numbers, such as [101, 2009, 102].');
  if (kind === 'body' && !body) throw new Error('A body is an object of JSON, as a client would send it.');
  const chosen = model || (kind === 'body' ? value.model : '');
  if (!chosen) throw new Error('Name a model: the prompt does not.');
  if (kind === 'tokens') return { model: chosen, prompt: { tokens: { ids: value } } };
  return { model: chosen, prompt: { openai_body: base64(kind === 'body' ? prompt : JSON.stringify({ model: chosen, prompt })) } };
}

// decisions says why a request goes, or went, where it does. id: of a request.
export function decisions(id) {
  if (id) asked.id = id;
  const models = h('datalist', { id: 'models' });
  const offered = slot(models);
  const input = (key, props) => {
    const control = h(props.tag || 'input', { ...props, tag: undefined, oninput: () => { asked[key] = control.value; } });
    control.value = asked[key];
    return control;
  };
  const field = (label, control, how = '') => h('label', { class: `field ${how}` }, label, control);

  const found = h('div', { class: 'stack', 'aria-live': 'polite' });
  const explained = h('div', { class: 'stack', 'aria-live': 'polite' });

  // answered shows what becomes of a question, while its button waits.
  async function answered(place, button, make) {
    button.disabled = true;
    place.replaceChildren(h('p', { class: 'loading' }, 'Asking…'));
    try {
      place.replaceChildren(...[await make()].flat(Infinity).filter(Boolean));
    } catch (e) {
      place.replaceChildren(h('p', { class: 'error', role: 'alert' }, sentence(e)));
    }
    button.disabled = false;
  }

  const find = h('button', { class: 'do', type: 'submit' }, 'Find');
  const explain = h('button', { class: 'do', type: 'submit' }, 'Explain');
  const seek = () => answered(found, find, async () => {
    const query = new URLSearchParams({ request_id: asked.id, ...(asked.tenant ? { tenant: asked.tenant } : {}) });
    const answer = await ask(`v1/decision?${query}`);
    return [h('p', { class: 'note' }, `Decided ${span(answer.age_ms)} ago, as it was answered then.`), ranking(answer.decision.ranking, `Candidates of request ${asked.id}`)];
  });
  const element = h('div', { class: 'stack' },
    h('div', null, h('h1', null, 'Why did it go there?'),
      h('p', { class: 'lead' }, 'Find what was answered to a request, or ask where one would go now. Asking changes nothing.')),
    h('section', { class: 'card stack' }, h('h2', null, 'A request that was picked'),
      h('form', { onsubmit: (e) => { e.preventDefault(); seek(); } },
        field('Request id', input('id', { name: 'id', required: true, maxlength: 128, autocomplete: 'off', spellcheck: 'false' }), 'grow'),
        field('Tenant, if it has one', input('tenant', { name: 'tenant', maxlength: 256, autocomplete: 'off' })), find), found),
    h('section', { class: 'card stack' }, h('h2', null, 'Where would this go?'),
      h('form', { onsubmit: (e) => {
        e.preventDefault();
        answered(explained, explain, async () => {
          const answer = await ask('v1/explain', { request: question(asked), shadow_policy: asked.compare });
          return [ranking(answer.ranking, 'Candidates'), compared(answer.counterfactual)];
        });
      } },
      field('Prompt: text, token ids, or the body of a request', input('prompt', { tag: 'textarea', name: 'prompt', rows: 6, required: true, spellcheck: 'false' }), 'whole'),
      h('div', { class: 'filters' }, field('Model', input('model', { name: 'model', list: 'models', autocomplete: 'off' })), models,
        field('The prompt is', h('select', { name: 'as', onchange: (e) => { asked.as = e.target.value; } },
          [['auto', 'what it looks like'], ['text', 'text'], ['tokens', 'token ids'], ['body', 'a body']].map(([value, title]) => h('option', { value, selected: value === asked.as }, title)))),
        field('Compare with policy', input('compare', { name: 'compare', placeholder: 'e.g. least-requests', autocomplete: 'off', spellcheck: 'false' })), explain)), explained));
  const lately = recent();
  element.append(h('section', { class: 'card' }, h('h2', null, 'The last ones'), lately.element));
  if (id) seek();
  return {
    element,
    close: () => lately.close(),
    update({ members }) {
      const names = [...new Set(members.flatMap((m) => [...m.models, ...m.adapters]))].sort();
      offered.show(names, () => names.map((name) => h('option', { value: name })));
    },
  };
}

const sentence = (e) => (e.reason === 'UNKNOWN_REQUEST' ? 'No decision of that request is remembered: decisions are kept for ten minutes, and only of requests that named themselves.' : e.message);

function compared(c) {
  if (!c) return null;
  const cached = Math.abs(c.cached_tokens);
  return h('p', { class: 'note' }, c.same
    ? `The policy ${c.policy} would have sent it to the same member.`
    : `The policy ${c.policy} would have sent it to ${c.member.pod}: ${Math.abs(c.first_token_ms) < 0.05 ? 'the first token at the same time' : `the first token ${span(Math.abs(c.first_token_ms))} ${c.first_token_ms < 0 ? 'sooner' : 'later'}`}, ${cached ? `${number(cached)} cached tokens ${c.cached_tokens < 0 ? 'fewer' : 'more'}` : 'as many cached tokens'}.`);
}
