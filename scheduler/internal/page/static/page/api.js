// Asks the API as HTTP/JSON, by paths beside the page's own: whatever stands
// before the scheduler may put both under a prefix.

const patience = 20000;

// Refusal of the API, with its reason.
export class Refusal extends Error {
  constructor(status, message, reason) {
    super(message);
    this.status = status;
    this.reason = reason;
  }
}

async function refusal(response) {
  const said = await response.text();
  try {
    const { message, details = [] } = JSON.parse(said);
    return new Refusal(response.status, message || response.statusText, details.find((d) => d.reason)?.reason);
  } catch {
    return new Refusal(response.status, said.trim().slice(0, 500) || `status ${response.status}`);
  }
}

// ask for an answer; with a body it is a question by POST.
export async function ask(path, body) {
  const options = { signal: AbortSignal.timeout(patience), headers: { Accept: 'application/json' } };
  if (body !== undefined) {
    options.method = 'POST';
    options.headers['Content-Type'] = 'application/json';
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (e) {
    throw new Refusal(0, e.name === 'TimeoutError' ? `no answer within ${patience / 1000} s` : 'the scheduler cannot be reached');
  }
  if (!response.ok) throw await refusal(response);
  return response.json();
}

// lines of an answer that goes on. It ends with the answer, or with an error;
// nothing for `first` ms at the start is an error, too.
async function* lines(path, signal, first) {
  const stop = new AbortController();
  const timer = setTimeout(() => stop.abort(), first);
  const response = await fetch(path, { signal: AbortSignal.any([signal, stop.signal]) });
  if (!response.ok) throw await refusal(response);
  let rest = '';
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    clearTimeout(timer);
    rest += value;
    for (let end = rest.indexOf('\n'); end >= 0; end = rest.indexOf('\n')) {
      if (end > 0) yield JSON.parse(rest.slice(0, end));
      rest = rest.slice(end + 1);
    }
  }
}

const pause = (ms) => new Promise((go) => { setTimeout(go, ms); });

// follow the members for good: by a watch, which tells changes, and by asking now
// and then, which tells ages and that the scheduler is there. Where there is no
// watch, as behind what holds answers back, by asking alone.
export function follow(seen, lost) {
  let heard = 0;
  let interval = 1000;
  const look = async () => {
    const fleet = await ask('v1/members');
    interval = Math.min(5000, Math.max(1000, 3 * fleet.members.length));
    heard = Date.now();
    return fleet;
  };
  let watching = false;
  (async () => {
    for (;;) {
      const stop = new AbortController();
      try {
        for await (const line of lines(`v1/members:watch?interval_ms=${interval}`, stop.signal, 8000)) {
          if (line.error) break;
          watching = true;
          heard = Date.now();
          seen(line.result.fleet, 'live');
        }
      } catch { /* it is tried again */ }
      stop.abort();
      watching = false;
      await pause(5000);
    }
  })();
  (async () => {
    for (;;) {
      const due = heard + (watching ? 2 * interval : interval) - Date.now();
      if (due > 0) {
        await pause(due);
        continue;
      }
      try {
        seen(await look(), watching ? 'live' : 'polling');
      } catch (e) {
        lost(e.message);
        await pause(2000);
      }
    }
  })();
}
