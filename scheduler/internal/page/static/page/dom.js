// What is drawn is made of elements and texts, never of markup: names that
// members and callers chose cannot become anything else.

const svgNames = 'http://www.w3.org/2000/svg';

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

// h makes an element: h('p', {class: 'note'}, 'text', child).
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

// s is h for what is inside an <svg>, and itself.
export function s(tag, props, ...children) {
  return fill(document.createElementNS(svgNames, tag), props, children);
}

// text sets a node's text if that changes.
export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

// attribute sets an attribute if that changes.
export function attribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// width of a part of a bar, from 0 to 1.
export function width(node, share) {
  const value = `${(100 * Math.max(0, Math.min(1, share || 0))).toFixed(2)}%`;
  if (node.style.width !== value) node.style.width = value;
}

// slot is an element whose content is made anew only when what it shows changed.
export function slot(element) {
  let last;
  return {
    element,
    show(key, make) {
      const signature = JSON.stringify(key);
      if (signature === last) return;
      last = signature;
      element.replaceChildren(...[make()].flat(Infinity).filter(Boolean));
    },
  };
}

// bar of parts [name, share of the whole], with a label for those who do not see it.
export function bar(parts, label, thin) {
  return h('div', { class: thin ? 'bar thin' : 'bar', role: 'img', 'aria-label': label }, parts.map(([name, share]) => {
    const part = h('i', { 'data-part': name });
    width(part, share);
    return part;
  }));
}

// prose is a sentence in which `this` is code.
export function prose(sentence) {
  return sentence.split('`').map((part, i) => (i % 2 ? h('code', null, part) : part));
}

// link to a member's own page.
export function memberLink(id, label) {
  return h('a', { href: `#/fleet/${encodeURIComponent(id)}` }, label || id);
}

// trust in a word.
export function trustMark(trust) {
  return h('span', { class: 'trust', 'data-trust': trust }, trust);
}
