// What the page knows: the members as they are told, as plain records, and what
// follows from them.

const big = (v) => Number(v || 0);

// member of an answer, flat.
export function member(m) {
  const state = m.cache_state || {};
  const labels = m.labels || {};
  const capacity = big(m.capacity_blocks);
  return {
    id: m.member.id,
    pod: m.member.pod,
    namespace: m.member.namespace,
    rank: m.member.rank,
    address: m.member.address,
    name: m.member.rank ? `${m.member.pod} rank ${m.member.rank}` : m.member.pod,
    trust: (state.trust || 'TRUST_UNKNOWN').slice(6),
    why: state.explanation || '',
    began: Number(BigInt(state.epoch || 0) / 1000000n),
    sequence: big(state.sequence),
    batches: big(state.engine_batches),
    age: state.age_ms,
    models: m.models,
    adapters: m.adapters,
    engine: m.engine_version || 'unknown',
    agent: m.agent_release || 'unknown',
    labels,
    role: labels['kvscout.role'] || labels['llm-d.ai/role'] || labels.role || '',
    blockSize: m.block_size_tokens,
    capacity,
    held: [big(m.held_gpu_blocks), big(m.held_host_blocks), big(m.held_disk_blocks)],
    fill: capacity ? Math.min(1, big(m.held_gpu_blocks) / capacity) : undefined,
    running: m.running_requests,
    waiting: m.waiting_requests,
    load: (m.running_requests ?? 0) + (m.waiting_requests ?? 0) + m.reserved_requests,
    kv: m.kv_usage,
    loadAge: m.load_age_ms,
    reserved: big(m.reserved_tokens),
    reservedRequests: m.reserved_requests,
    ineligible: m.ineligible === 'INELIGIBLE_UNSPECIFIED' ? '' : m.ineligible.slice(11),
    failingFor: m.failing_for_ms,
    reported: { requests: big(m.reported_requests), prompt: big(m.reported_prompt_tokens), cached: big(m.reported_cached_tokens), predicted: big(m.predicted_cached_tokens) },
    speed: m.speed,
    rate: m.speed?.token_ms > 0 ? 1000 / m.speed.token_ms : undefined,
    warning: m.warning,
  };
}

const outs = {
  SLEEPING: 'the engine sleeps',
  SILENT: 'its agent is silent',
  UNREACHABLE: 'its agent does not reach the engine',
  FAILING: 'callers reported failures',
  CORDONED: 'its node is cordoned',
  NOT_READY: 'its pod is not ready',
  EVICTED: 'its pod is being evicted',
  DELETING: 'its pod is being deleted',
  ENDED: 'its pod has ended',
};

// out says in words why a member takes no part in picks; empty: it does.
export const out = (m) => (m.ineligible ? outs[m.ineligible] || m.ineligible.toLowerCase().replaceAll('_', ' ') : '');

export const trusts = ['EXACT', 'APPROXIMATE', 'SYNCING', 'UNKNOWN'];

export const meaning = {
  EXACT: 'equals what the engine announced, verified by count and digest',
  APPROXIMATE: 'what is believed held is held; more may be held besides',
  SYNCING: 'is being fetched or verified; no credit for the cache until then',
  UNKNOWN: 'the engine sends no usable events; picked by load alone',
};

// sums over members.
export function sums(members) {
  const t = { running: 0, waiting: 0, requests: 0, prompt: 0, cached: 0, predicted: 0, saved: 0, out: 0, trust: { EXACT: 0, APPROXIMATE: 0, SYNCING: 0, UNKNOWN: 0 } };
  for (const m of members) {
    t.running += m.running ?? 0;
    t.waiting += m.waiting ?? 0;
    t.requests += m.reported.requests;
    t.prompt += m.reported.prompt;
    t.cached += m.reported.cached;
    t.predicted += m.reported.predicted;
    t.saved += m.reported.cached * (m.speed?.token_ms || 0);
    t.trust[m.trust] += 1;
    if (m.ineligible) t.out += 1;
  }
  return t;
}

let advice = [];

// loadAdvice is asked for once; without it reasons stand alone.
export async function loadAdvice() {
  try {
    const response = await fetch('page/advice.json');
    if (!response.ok) return;
    advice = (await response.json()).map((a) => ({ is: new RegExp(`(?:^|; )(?:${a.is})`), do: a.do }));
  } catch { /* reasons stand alone */ }
}

// adviceOn a reason; empty: there is none.
export function adviceOn(reason) {
  return advice.find((a) => a.is.test(reason))?.do || '';
}
