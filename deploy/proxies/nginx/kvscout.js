// Asks kvscout where a completion should go, over HTTP/JSON, and says what came of
// it. What is known of a request is in the variables of nginx.conf, since each
// location that it passes through begins anew here.
export default { pick, next, watch, report };

// Headers in which a client may name its session, as -session-headers has them.
const sessionHeaders = ['x-session-id'];
// Whether an address stands for several data-parallel ranks of an engine.
const ranks = false;
// So many members are tried.
const candidates = 3;
// Pieces of an answer's end, as they come from the engine, in which its counts are.
const maxPieces = 4;

async function pick(r) {
    const v = r.variables;
    let why;
    try {
        why = r.method == 'POST' ? await ask(r) : 'METHOD';
    } catch (e) {
        r.error('kvscout: ' + e.message);
        why = 'NO_ANSWER';
    }
    if (why === null) {
        return; // answered
    }
    v.kvscout_fallback = why;
    next(r);
}

// ask leaves the ranking in the variables, and returns why there is none.
async function ask(r) {
    const v = r.variables;
    let body;
    try {
        body = r.requestBuffer;
    } catch (e) {
        return 'BODY_TOO_LARGE';
    }
    if (!body || body.length == 0) {
        return 'NO_BODY';
    }
    const headers = {};
    sessionHeaders.forEach(name => {
        if (r.headersIn[name]) {
            headers[name] = r.headersIn[name];
        }
    });
    const answer = await r.subrequest('/kvscout/pick', { method: 'POST', body: '{"request":{"max_candidates":' + candidates +
        ',"headers":' + JSON.stringify(headers) + ',"prompt":{"openai_body":"' + body.toString('base64') + '"}}}' });
    if (answer.status != 200) {
        return refused(r, answer);
    }
    const said = JSON.parse(answer.responseText);
    const members = said.ranking.candidates.map(candidate => candidate.member).filter(member => member);
    if (!/^[0-9a-f]{1,64}$/.test(said.decision_id)) {
        return 'NO_ANSWER';
    }
    v.kvscout_decision = said.decision_id;
    v.kvscout_outcome = 'CANCELLED'; // unless more becomes known
    v.kvscout_ranking = JSON.stringify(members);
    return '';
}

// refused passes on that the scheduler lets nobody wait any more, or has let the
// request wait for too long; all else falls back.
function refused(r, answer) {
    let said;
    try {
        said = JSON.parse(answer.responseText);
    } catch (e) {
        return 'NO_ANSWER';
    }
    const reason = said.details[0].reason;
    if (answer.status != 429 && reason != 'QUEUE_TIMEOUT') {
        return reason;
    }
    const status = answer.status == 429 ? 429 : 503;
    if (answer.headersOut['Retry-After']) {
        r.headersOut['Retry-After'] = answer.headersOut['Retry-After'];
    }
    r.headersOut['Content-Type'] = 'application/json';
    r.return(status, JSON.stringify({ error: { message: said.message, code: status } }));
    return null;
}

// next sends the request to the best of the ranking that was not tried, and when
// there is none, to the engines in turn.
function next(r) {
    const v = r.variables;
    const ranking = JSON.parse(v.kvscout_ranking || '[]');
    while (ranking.length > 0) {
        const member = ranking.shift();
        v.kvscout_address = member.address;
        if (v.kvscout_upstream) {
            v.kvscout_outcome = 'CANCELLED'; // unless more becomes known
    v.kvscout_ranking = JSON.stringify(ranking);
            v.kvscout_member = member.id;
            v.kvscout_rank = ranks ? member.rank : '';
            v.kvscout_since = Date.now();
            r.internalRedirect('@picked');
            return;
        }
    }
    if (v.kvscout_member) {
        v.kvscout_outcome = 'FAILED';
        v.kvscout_member = '';
    }
    v.kvscout_rank = '';
    r.internalRedirect(v.kvscout_decision ? '@instead' : '@engines');
}

// The last pieces of an answer, of which its end is made. Nothing else is kept, since
// njs frees what a request has used when the request ends.
const pieces = [];
let seen = 0;

// watch reads an answer as it passes, and passes it on as it is.
function watch(r, data, flags) {
    if (data.length > 0) {
        if (seen == 0 && /^text\/event-stream/.test(r.headersOut['Content-Type'])) {
            r.variables.kvscout_first = ',"ttft_ms":' + (Date.now() - r.variables.kvscout_since);
        }
        pieces[seen++ % maxPieces] = data.toString();
    }
    if (flags.last) {
        const end = pieces.slice(seen % maxPieces).concat(pieces.slice(0, seen % maxPieces)).join('');
        if (r.status >= 500 || end.includes('data: {"error"')) {
            r.variables.kvscout_outcome = 'FAILED';
        } else if (r.status < 400) {
            r.variables.kvscout_outcome = 'FINISHED';
            r.variables.kvscout_counts = counts(end);
        }
    }
    r.sendBuffer(data, flags);
}

// counts are those of the engine, at the end of a JSON object or in the last event.
function counts(text) {
    const found = /^"usage":\s*(\{[^{}]*(\{[^{}]*\}[^{}]*)*\})/.exec(text.slice(text.lastIndexOf('"usage":')));
    if (!found) {
        return '';
    }
    const usage = JSON.parse(found[1]);
    const details = usage.prompt_tokens_details || {};
    return [['prompt_tokens', usage.prompt_tokens], ['output_tokens', usage.completion_tokens], ['cached_tokens', details.cached_tokens]]
        .filter(field => Number.isInteger(field[1])).map(field => ',"' + field[0] + '":' + field[1]).join('');
}

// report is what is said of the decision when the request is over.
function report(r) {
    const v = r.variables;
    let text = '{"reports":[{"decision_id":"' + v.kvscout_decision + '","outcome":"OUTCOME_' + v.kvscout_outcome + '"';
    if (v.kvscout_member) {
        text += ',"member_id":' + JSON.stringify(v.kvscout_member);
    }
    if (v.kvscout_outcome == 'FINISHED') {
        text += (v.kvscout_first || '') + v.kvscout_counts;
    }
    return text + '}]}';
}
