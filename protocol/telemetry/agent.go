package telemetry

// Labels of the agent's metrics.
const (
	// LabelRank: the data-parallel rank.
	LabelRank = "rank"
	// LabelLane: gpu, host, disk.
	LabelLane = "lane"
)

// Metrics of the agent, all by rank but the probes.
const (
	// AgentTrust is 1 for the trust that a rank's cache state deserves (trust).
	AgentTrust = "kvscout.agent.trust"
	// AgentBelieved is 1 while a scheduler believes what the agent says of the rank.
	AgentBelieved = "kvscout.agent.believed"
	// AgentSchedulers are counted by what they make of the rank: a trust, or
	// refused (trust).
	AgentSchedulers = "kvscout.agent.schedulers"
	// AgentBlocks are held (lane).
	AgentBlocks = "kvscout.agent.blocks"
	// AgentEngineBatches is one more than the sequence of the engine's newest
	// applied batch; 0: none.
	AgentEngineBatches = "kvscout.agent.engine_batches"
	// AgentConnected is 1 while the engine's event stream is connected.
	AgentConnected = "kvscout.agent.connected"
	// AgentTailEvents counts what happened to the engine's stream (event).
	AgentTailEvents = "kvscout.agent.tail.events"
	// AgentSkipped counts what was passed over in events, or withheld (event).
	AgentSkipped = "kvscout.agent.skipped"
	// AgentMirrorNodes are hashes that the mirror remembers (event).
	AgentMirrorNodes = "kvscout.agent.mirror.nodes"
	// AgentMirrorEvents counts what happened in the mirror (event).
	AgentMirrorEvents = "kvscout.agent.mirror.events"
	// AgentPublishEvents counts what went over NATS (event).
	AgentPublishEvents = "kvscout.agent.publish.events"
	// AgentStateEvents counts what happened to the state file (event).
	AgentStateEvents = "kvscout.agent.state.events"
	// AgentStateBytes is the size of the newest state file.
	AgentStateBytes = "kvscout.agent.state.bytes"
	// AgentAudits counts audits of an idle engine (outcome).
	AgentAudits = "kvscout.agent.audits"
	// AgentHungUp counts connections for probes that were hung up on (event).
	AgentHungUp = "kvscout.agent.hung_up"
	// AgentProbes counts polls of the engine's HTTP server (outcome).
	AgentProbes = "kvscout.agent.probes"
)
