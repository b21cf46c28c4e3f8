-- Asks kvscout where a completion should go, over HTTP/JSON, and reports what came
-- of it. The action leaves the name of one of the backend's servers in
-- txn.kvscout_server. Where there is none, txn.kvscout_fallback says why, and the
-- backend balances by itself. The filter reads the answer as it passes.

-- Where haproxy.cfg has the section "listen kvscout", whose times bound each call.
local kvscout = "abns@kvscout"
local max_seconds = 60
-- Headers in which a client may name its session, as -session-headers has them.
local session_headers = { "x-session-id" }
-- Whether an address stands for several data-parallel ranks of an engine.
local ranks = false
-- So many members of a ranking are considered.
local candidates = 3
-- Reports that wait for kvscout, and go with one call. What comes beyond is lost, and
-- the reservation expires.
local max_waiting, max_batch = 4096, 512
-- Bytes of an answer's end that are kept, in which the engine's counts are.
local max_end = 4096

-- call posts JSON and returns the status, the body and the header; nothing where no
-- answer came. It is HTTP/1.0, whose answers end where the connection does, and not
-- core.httpclient, which copies a whole tune.bufsize for each request to repeat it.
local function call(path, headers, body)
    local socket = core.tcp()
    socket:settimeout(max_seconds)
    if not socket:connect(kvscout) then return end
    socket:send("POST " .. path .. " HTTP/1.0\r\nhost: kvscout\r\ncontent-type: application/json\r\ncontent-length: " .. #body .. headers .. "\r\n\r\n")
    socket:send(body)
    local answer = socket:receive("*a")
    socket:close()
    local header, text = (answer or ""):match("^(.-\r\n)\r\n(.*)$")
    local status = header and header:match("^HTTP/1%.%d (%d+)")
    if status then return tonumber(status), text, header end
end

local function now_ms()
    local now = core.now()
    return now.sec * 1000 + now.usec / 1000
end

local function quoted(txn, text) return '"' .. txn.c:json(text, "utf8s") .. '"' end

-- server_at is the name of the backend's server at an address; nil: there is none
-- that may be used.
local function server_at(backend, address)
    for name, server in pairs(core.backends[backend].servers) do
        if server:get_addr() == address then
            local status = server:get_stats().status
            if status == "no check" or status:find("^UP") then return name end
        end
    end
end

-- refuse passes on that the scheduler lets nobody wait any more, or has let the
-- request wait for too long.
local function refuse(txn, status, message, wait)
    local reply = txn:reply { status = status }
    if wait then reply:add_header("retry-after", wait) end
    reply:add_header("content-type", "application/json")
    reply:set_body('{"error":{"message":' .. quoted(txn, message) .. ',"code":' .. status .. "}}")
    txn:done(reply)
end

local function prompt_of(txn)
    local body = txn.f:req_body()
    if not body or txn.f:req_body_len() < txn.f:req_body_size() then return end
    local encoded = txn.c:base64(body)
    if encoded and #encoded >= #body then return encoded end
end

core.register_action("kvscout", { "http-req" }, function(txn, backend)
    local function fall_back(why) txn:set_var("txn.kvscout_fallback", why) end
    local prompt = prompt_of(txn)
    if not prompt then return fall_back("BODY_TOO_LARGE") end

    local named, trace = {}, txn.f:req_hdr("traceparent")
    for _, name in ipairs(session_headers) do
        local value = txn.f:req_hdr(name)
        if value then table.insert(named, quoted(txn, name) .. ":" .. quoted(txn, value)) end
    end
    local status, answer, header = call("/v1/pick", trace and "\r\ntraceparent: " .. trace or "", '{"request":{"max_candidates":' .. candidates ..
        ',"headers":{' .. table.concat(named, ",") .. '},"prompt":{"openai_body":"' .. prompt .. '"}}}')
    if not status then return fall_back("NO_ANSWER") end
    local function said(path) return txn.c:json_query(answer, path) end
    if status ~= 200 then
        local reason = said("$.details[0].reason") or "NO_ANSWER"
        if status == 429 or reason == "QUEUE_TIMEOUT" then
            return refuse(txn, status == 429 and 429 or 503, said("$.message"), header:lower():match("\nretry%-after: (%d+)"))
        end
        return fall_back(reason)
    end
    local decision = tostring(said("$.decision_id")):match("^%x+$")
    if not decision or #decision > 64 then return fall_back("NO_ANSWER") end
    txn:set_var("txn.kvscout_decision", decision)
    txn:set_var("txn.kvscout_since", tostring(now_ms()))
    for i = 0, candidates - 1 do
        local member = "$.ranking.candidates[" .. i .. "].member"
        local address = said(member .. ".address")
        local server = address and server_at(backend, address)
        if server then
            if not txn:get_var("txn.kvscout_server") then
                txn:set_var("txn.kvscout_server", server)
                if ranks then txn.http:req_set_header("x-data-parallel-rank", tostring(said(member .. ".rank"))) end
            end
            txn:set_var("txn.kvscout_member_" .. i, server .. " " .. said(member .. ".id"))
        end
    end
    if not txn:get_var("txn.kvscout_server") then fall_back("NO_SUCH_SERVER") end
end, 1)

local waiting = core.queue()

core.register_task(function()
    while true do
        local batch = { waiting:pop_wait() }
        while #batch < max_batch and waiting:size() > 0 do table.insert(batch, waiting:pop()) end
        call("/v1/report", "", '{"reports":[' .. table.concat(batch, ",") .. "]}")
    end
end)

local function report(txn, outcome, more)
    if waiting:size() < max_waiting then
        waiting:push('{"decision_id":"' .. txn:get_var("txn.kvscout_decision") .. '","outcome":"OUTCOME_' .. outcome .. '"' .. more .. "}")
    end
end

-- member_at is the id of the member behind a server, if it was among the candidates.
local function member_at(txn, server)
    for i = 0, candidates - 1 do
        local name, id = (txn:get_var("txn.kvscout_member_" .. i) or ""):match("^(%S+) (.*)$")
        if name == server then return id end
    end
end

-- counts are those of the engine, at the end of a JSON object or in the last event.
local function counts(txn, text)
    local usage, fields = text:match('^.*"usage":%s*(%b{})'), ""
    for field, path in pairs { prompt_tokens = "$.prompt_tokens", output_tokens = "$.completion_tokens", cached_tokens = "$.prompt_tokens_details.cached_tokens" } do
        local n = usage and math.tointeger(txn.c:json_query(usage, path))
        if n then fields = fields .. ',"' .. field .. '":' .. n end
    end
    return fields
end

local Answer = { id = "kvscout", flags = filter.FLT_CFG_FL_HTX }
Answer.__index = Answer

function Answer:new() return setmetatable({ tail = "" }, Answer) end

function Answer:http_headers(txn, message)
    if message.channel:is_resp() and txn:get_var("txn.kvscout_decision") then
        local kind = message:get_headers()["content-type"]
        self.events = kind and kind[0]:find("^text/event%-stream") ~= nil
        filter.register_data_filter(self, message.channel)
    end
    return filter.CONTINUE
end

function Answer:http_payload(txn, message)
    local piece = message:body()
    if not piece or #piece == 0 then return end
    if self.events and not self.first then
        self.first = ',"ttft_ms":' .. now_ms() - txn:get_var("txn.kvscout_since")
        report(txn, "FIRST_TOKEN", self.first)
    end
    self.tail = (#piece < max_end and self.tail .. piece or piece):sub(-max_end)
end

function Answer:http_end(_, message)
    self.whole = message.channel:is_resp()
    return filter.CONTINUE
end

function Answer:end_analyze(txn, channel)
    if not channel:is_resp() or self.closed or not txn:get_var("txn.kvscout_decision") then return end
    self.closed = true
    local status, member = txn:get_var("txn.kvscout_status") or 0, member_at(txn, txn.f:srv_name())
    if not txn:get_var("txn.kvscout_server") then
        report(txn, "CANCELLED", "") -- never sent
    elseif status >= 500 or not member or self.tail:find('data: {"error"', 1, true) then
        report(txn, "FAILED", "")
    elseif not self.whole or status >= 400 then
        report(txn, "CANCELLED", ',"member_id":' .. quoted(txn, member))
    else
        report(txn, "FINISHED", ',"member_id":' .. quoted(txn, member) .. (self.first or "") .. counts(txn, self.tail))
    end
end

core.register_filter("kvscout", Answer, function(instance) return instance end)
