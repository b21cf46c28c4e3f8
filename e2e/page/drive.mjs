// Drives the page of a scheduler in a real Chromium, as a person would: each view,
// in light and dark, wide and narrow, with what axe-core finds wrong for those who
// do not see it, and a picture of each. Told of the page's address, what is there,
// and where pictures go.

import assert from 'node:assert/strict';
import { createRequire } from 'node:module';
import { mkdirSync, readFileSync } from 'node:fs';

const modules = createRequire(`${process.env.KVSCOUT_PAGE_MODULES}/of`);
const { chromium } = modules('playwright-core');
const axe = readFileSync(modules.resolve('axe-core/axe.min.js'), 'utf8');
const { url, empty, pictures, request, member, suspect } = JSON.parse(process.argv[2]);
mkdirSync(pictures, { recursive: true });

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage'] });
const widths = { wide: { width: 1280, height: 800 }, narrow: { width: 390, height: 844 } };
const wrong = [];

// open a page of its own. What its console complains of is a failure: scripts,
// and whatever the content security policy refused.
async function open(at, { theme = 'light', size = 'wide', before, expect = () => false } = {}) {
  const context = await browser.newContext({ viewport: widths[size], colorScheme: theme, reducedMotion: 'reduce' });
  const page = await context.newPage();
  page.setDefaultTimeout(Number(process.env.KVSCOUT_PAGE_PATIENCE || 30000));
  page.on('console', (m) => { if (m.type() === 'error' && !expect(m.text())) wrong.push(`${at}: ${m.text()}`); });
  page.on('pageerror', (e) => wrong.push(`${at}: ${e.stack}`));
  page.on('request', (r) => { if (!r.url().startsWith(new URL(at).origin)) wrong.push(`${at} asks for ${r.url()}`); });
  await before?.(page);
  await page.goto(at);
  return page;
}

async function picture(page, name) {
  await page.evaluate(() => new Promise((go) => { requestAnimationFrame(() => requestAnimationFrame(go)); }));
  const broad = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  assert.ok(broad <= 0, `${name} is ${broad} pixels broader than the window`);
  await page.screenshot({ path: `${pictures}/${name}.png`, fullPage: name.indexOf('thousand') < 0 });
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ['violations'] }));
  for (const v of violations) {
    if (v.impact === 'serious' || v.impact === 'critical') wrong.push(`${name}: ${v.id}: ${v.help}: ${v.nodes.slice(0, 3).map((n) => `${n.html} ${n.failureSummary}`).join('\n')}`);
  }
}

// views, each with what has to be seen on it and done.
const views = {
  gain: async (page) => {
    await page.getByText('What does it gain?').waitFor();
    await page.getByText('of prompt tokens not computed').waitFor();
    assert.match(await page.getByLabel('What does it gain?').first().innerText(), /[1-9][\d.]* %/);
    await page.getByText('Look here').waitFor(); // one member is not believed
    await page.getByText('Fewest requests would have had').waitFor();
    const step = page.locator('summary', { hasText: 'The picked member held' });
    await step.click();
    await page.getByText('were given up because their holder would have taken longer').waitFor();
    const lost = page.locator('summary', { hasText: 'unseen' });
    await lost.click();
    await page.getByText('To do: nothing: nobody has it').waitFor();
    await page.locator('.live[data-mode="live"]').waitFor();
  },
  truth: async (page) => {
    await page.getByRole('link', { name: 'Truth' }).click();
    await page.getByRole('heading', { name: 'Is what it believes true?' }).waitFor();
    await page.getByText('no KV events').first().waitFor();
    await page.getByText('--kv-events-config').first().waitFor(); // what to do about it
    assert.equal(await page.getByRole('link', { name: suspect }).count(), 1);
    await page.getByRole('rowheader', { name: /^vLLM / }).waitFor();
  },
  fleet: async (page) => {
    await page.getByRole('link', { name: 'Fleet', exact: true }).click();
    await page.getByRole('table', { name: 'Members' }).getByRole('link', { name: suspect }).waitFor();
    const names = () => page.locator('.grid .body a').allInnerTexts();
    const up = await names();
    await page.getByRole('button', { name: 'Member', exact: true }).click();
    await page.locator('[role=columnheader][aria-sort=descending]').waitFor();
    const places = await page.locator('.grid .body .row').evaluateAll((rows) => rows.map((r) => [Number(r.getAttribute('aria-rowindex')), r.querySelector('a').textContent]).sort((a, b) => a[0] - b[0]).map((r) => r[1]));
    assert.deepEqual(places, up.toSorted((a, b) => b.localeCompare(a, 'en', { numeric: true })));
    await page.getByRole('button', { name: 'Member', exact: true }).click();
    await page.getByLabel('Find').fill('no KV events');
    await page.getByText(`1 of ${up.length} members`).waitFor();
    await page.getByLabel('Find').fill('nobody has this name');
    await page.getByText('No member fits').waitFor();
    await page.getByLabel('Find').fill('');
    await page.getByLabel('Cache state').selectOption('UNKNOWN');
    await page.getByText(`1 of ${up.length} members`).waitFor();
    await page.getByLabel('Cache state').selectOption('');
    await page.getByLabel('Shade by').selectOption('kv');
    await page.getByText('shaded by part of the KV cache').waitFor();
  },
  member: async (page) => {
    await page.getByRole('link', { name: 'Fleet', exact: true }).click();
    await page.locator('.grid').getByRole('link', { name: member, exact: true }).click();
    await page.getByRole('heading', { name: member, exact: true }).waitFor();
    await page.getByText('Incarnation').waitFor();
    await page.getByText('Prefill time by prompt length').waitFor();
    await page.locator('.recent details').first().waitFor(); // its last decisions
  },
  prefixes: async (page) => {
    await page.getByRole('link', { name: 'Prefixes', exact: true }).click();
    await page.getByRole('table', { name: 'Shared beginnings' }).waitFor();
    await page.locator('table.heat td[data-held="true"]').first().waitFor();
  },
  timeline: async (page) => {
    await page.getByRole('link', { name: 'Timeline', exact: true }).click();
    await page.locator('.changes').getByRole('link', { name: suspect }).first().waitFor();
    await page.getByLabel('Show').selectOption('facts');
    await page.locator('.changes li[data-kind=members]').first().waitFor({ state: 'detached' });
    await page.getByLabel('Show').selectOption('');
    await page.locator('.changes li[data-kind=members]').first().waitFor();
  },
  recent: async (page) => {
    await page.getByRole('link', { name: 'Decisions', exact: true }).click();
    const last = page.locator('.recent details').first();
    await last.locator('summary').getByText('finished').waitFor();
    await last.locator('summary').click();
    await last.getByRole('table').waitFor();
  },
  found: async (page) => {
    await page.getByRole('link', { name: 'Decisions', exact: true }).click();
    await page.getByLabel('Request id').fill('nobody asked this');
    await page.getByRole('button', { name: 'Find', exact: true }).click();
    await page.getByText('No decision of that request is remembered').waitFor();
    await page.getByLabel('Request id').fill(request);
    await page.getByLabel('Request id').press('Enter');
    await page.getByRole('table', { name: `Candidates of request ${request}` }).waitFor();
    await page.getByText('tokens cached').first().waitFor();
  },
  explained: async (page) => {
    await page.getByRole('link', { name: 'Decisions', exact: true }).click();
    const explain = page.getByRole('button', { name: 'Explain' });
    await page.getByLabel('Prompt: text').fill('The quick brown fox jumps over the lazy dog. '.repeat(40));
    await page.getByLabel('Model').fill('');
    await explain.click();
    await page.getByText('Name a model').waitFor();
    await page.getByLabel('Model').fill('fake');
    await page.getByLabel('Compare with').fill('least-requests');
    await explain.click();
    await page.getByRole('table', { name: 'Candidates', exact: true }).waitFor();
    await page.getByText('The policy least-requests would have sent it').waitFor();
    await page.getByText('prefill – computing what is not cached').last().waitFor();
  },
};

{
  const t = Date.now();
  const points = Array.from({ length: 120 }, (_, i) => ({ time_ms: t - (120 - i) * 10000, reported_prompt_tokens: String(i * 10000), predicted_cached_tokens: String(Math.round(i * 6500 + 3000 * Math.sin(i / 9))), reported_cached_tokens: String(Math.round(i * 6400 + 3000 * Math.sin(i / 9))) }));
  for (const [theme, size] of [['light', 'wide'], ['dark', 'narrow']]) {
    const page = await open(`${url}#/truth`, { theme, size, before: (q) => q.route('**/v1/history', (r) => r.fulfill({ json: { points } })) });
    await page.locator('svg.chart').waitFor();
    await picture(page, `hour-${theme}-${size}`);
    console.log('ok hour');
  }
}
for (const theme of ['light', 'dark']) {
  for (const size of ['wide', 'narrow']) {
    const page = await open(url, { theme, size, expect: (m) => m.includes('404') }); // of the request that nobody asked
    for (const [name, view] of Object.entries(views)) {
      try {
        await view(page);
      } catch (e) {
        await page.screenshot({ path: `${pictures}/failed.png`, fullPage: true });
        throw e;
      }
      await picture(page, `${name}-${theme}-${size}`);
      console.log(`ok ${name} ${theme} ${size}`);
    }
    await page.context().close();
  }
}

// The keyboard alone reaches each view and what is in it.
{
  const page = await open(url);
  await page.getByText('What does it gain?').waitFor();
  await page.keyboard.press('Tab');
  assert.equal(await page.evaluate(() => document.activeElement.textContent), 'Skip to content');
  const reached = new Set();
  for (let i = 0; i < 12; i += 1) {
    await page.keyboard.press('Tab');
    reached.add(await page.evaluate(() => document.activeElement.textContent));
  }
  for (const name of ['Gain', 'Truth', 'Fleet', 'Prefixes', 'Decisions', 'Timeline']) assert.ok(reached.has(name), `Tab does not reach ${name}: ${[...reached]}`);
  await page.getByRole('link', { name: 'Fleet', exact: true }).focus();
  await page.keyboard.press('Enter');
  await page.getByRole('heading', { name: 'Fleet' }).waitFor();
  await page.getByRole('button', { name: /^Theme/ }).click();
  await page.getByRole('button', { name: 'Theme: light' }).click();
  assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), 'dark');
  await page.reload();
  await page.getByRole('button', { name: 'Theme: dark' }).waitFor();
  await page.context().close();
  console.log('ok keyboard and theme');
}

// A scheduler without members says what is missing.
for (const theme of ['light', 'dark']) {
  const page = await open(empty, { theme });
  await page.getByText('No member has announced itself').waitFor();
  await picture(page, `empty-${theme}-wide`);
  await page.getByRole('link', { name: 'Fleet', exact: true }).click();
  await page.getByText('kvscout doctor').waitFor();
  await picture(page, `empty-fleet-${theme}-wide`);
  await page.context().close();
  console.log(`ok empty ${theme}`);
}

// A thousand members, as the real ones many times over, that change all the time.
{
  let names;
  const many = (fleet, turn) => {
    const members = Array.from({ length: 1000 }, (_, i) => {
      const m = structuredClone(fleet.members[i % fleet.members.length]);
      m.member.pod = `engine-${i}`;
      m.member.id = `default_engine-${i}_0`;
      m.running_requests = (7 * i + turn * (i % 3)) % 60;
      m.waiting_requests = i % 9 === 0 ? (i + turn) % 8 : 0;
      m.kv_usage = ((i * 37 + turn) % 100) / 100;
      if (i % 50 === 7) m.ineligible = 'INELIGIBLE_SILENT';
      return m;
    });
    names = members.length;
    return { ...fleet, members };
  };
  const before = async (page) => {
    let turn = 0;
    await page.route('**/v1/members', async (route) => {
      const response = await route.fetch();
      turn += 1;
      await route.fulfill({ response, json: many(await response.json(), turn) });
    });
    await page.route('**/v1/members:watch*', (route) => route.abort());
  };
  for (const [theme, size] of [['light', 'wide'], ['dark', 'wide'], ['light', 'narrow']]) {
    const page = await open(`${url}#/fleet`, { theme, size, before, expect: (m) => m.includes('ERR_FAILED') });
    await page.getByText('1,000 members').waitFor();
    assert.equal(names, 1000);
    await page.locator('.live[data-mode="polling"]').waitFor(); // there is no watch
    assert.ok(await page.locator('.grid .body .row').count() < 60, 'rows that nobody sees are drawn');
    await page.evaluate(() => scrollTo(0, document.body.scrollHeight));
    await page.getByRole('link', { name: 'engine-999' }).waitFor();
    await page.evaluate(() => scrollTo(0, 0));
    const slowest = await page.evaluate(async () => { // the longest task while two answers come
      let most = 0;
      const observer = new PerformanceObserver((list) => { for (const e of list.getEntries()) most = Math.max(most, e.duration); });
      observer.observe({ type: 'longtask' });
      await new Promise((go) => { setTimeout(go, 7000); });
      observer.disconnect();
      return most;
    });
    console.log(`ok thousand ${theme} ${size}: longest task ${slowest} ms`);
    await picture(page, `thousand-${theme}-${size}`);
    await page.context().close();
  }
}

// A scheduler that goes away, and comes back.
{
  let away = true;
  const page = await open(url, { before: (p) => p.route('**/v1/**', (route) => (away ? route.abort() : route.continue())), expect: (m) => m.includes('ERR_FAILED') });
  await page.getByText('The scheduler does not answer').waitFor();
  await picture(page, 'lost-light-wide');
  away = false;
  await page.getByText('What does it gain?').waitFor();
  console.log('ok lost and back');
  await page.context().close();
}

// Refusals are shown as they are meant.
{
  const page = await open(`${url}#/decisions`, { before: (p) => p.route('**/v1/explain', (route) => route.fulfill({ status: 403, json: { code: 7, message: 'this is for whoever may use the API', details: [] } })), expect: (m) => m.includes('403') });
  await page.getByLabel('Prompt: text').fill('[1, 2, 3]');
  await page.getByLabel('Model').fill('fake');
  await page.getByRole('button', { name: 'Explain' }).click();
  await page.getByRole('alert').getByText('this is for whoever may use the API').waitFor();
  console.log('ok refusal');
  await page.context().close();
}

await browser.close();
if (wrong.length > 0) {
  console.error(wrong.join('\n'));
  process.exit(1);
}
