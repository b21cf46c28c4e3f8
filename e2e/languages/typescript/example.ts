// Pick, then Report, with what protoc-gen-es generates: node example.js HOST:PORT MODEL
import { createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

import { Outcome, ReportStatus, Scheduler } from "./gen/kvscout/scheduler/v1/scheduler_pb.js";

const [address, model] = process.argv.slice(2);
const scheduler = createClient(Scheduler, createGrpcTransport({ baseUrl: `http://${address}` }));

const ids = Array.from({ length: 160 }, (_, i) => i + 1);
const decision = await scheduler.pick(
  { request: { model, prompt: { form: { case: "tokens", value: { ids } } } } },
  { timeoutMs: 5000 },
);
const first = decision.ranking!.candidates[0];
const cached = first.cachedTokens?.gpu ?? 0;
console.log("picked", first.member!.address, cached);

// Here the request goes to first.member.address.

const answer = await scheduler.report(
  { reports: [{ decisionId: decision.decisionId, outcome: Outcome.FINISHED, promptTokens: 160, cachedTokens: cached }] },
  { timeoutMs: 5000 },
);
console.log("reported", ReportStatus[answer.results[0].status]);
process.exit(0); // the connection is kept for the next call
