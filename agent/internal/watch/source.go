package watch

import (
	"cmp"
	"net"
	"strings"

	"github.com/kvscout/kvscout/agent/internal/vllm"
)

const (
	// NoReplay as Config.Replay says that the engine has no replay socket.
	NoReplay          = "none"
	defaultEventsPort = "5557"
	replayOffset      = 100
)

// source is where a rank's events are: as the engine reports, because it knows;
// else as configured; else where most engines have them. An engine that connects
// to us cannot say where that is.
func (w *Watch) source(n int) vllm.Source {
	configured := w.configured(n)
	switch {
	case w.cfg.EventsBind, !w.said:
		return configured
	case w.unread != "" && w.cfg.Events != "":
		return configured
	case w.unread != "":
		return vllm.Source{Unusable: "what the engine says of its event endpoints cannot be used: " + w.unread}
	}
	chosen, known := w.sources[n]
	if !known {
		chosen.Unusable = "the engine publishes no KV events"
	}
	// The same port under another host is the same socket, seen from here.
	if w.cfg.Events != "" && samePort(configured.Endpoint, chosen.Endpoint) {
		chosen.Endpoint = configured.Endpoint
	}
	if w.cfg.Replay == NoReplay || w.cfg.Replay != "" && samePort(configured.Replay, chosen.Replay) {
		chosen.Replay = configured.Replay
	}
	overruled := w.cfg.Events != "" && chosen.Endpoint != configured.Endpoint || w.cfg.Replay != "" && chosen.Replay != configured.Replay
	if overruled && w.over[n] != chosen {
		w.over[n] = chosen
		w.cfg.Log.Warn("the engine reports other event endpoints than configured, which are used: correct or drop -events and -replay",
			"rank", n, "engine", w.cfg.URL, "configured", configured.Endpoint, "configured_replay", configured.Replay,
			"events", chosen.Endpoint, "replay", chosen.Replay, "unusable", chosen.Unusable)
	}
	return chosen
}

// configured is a rank's source by the configuration and by convention.
func (w *Watch) configured(n int) vllm.Source {
	host := w.cfg.Engine.Host()
	base := cmp.Or(w.cfg.Events, "tcp://"+net.JoinHostPort(host, defaultEventsPort))
	endpoint, err := vllm.RankEndpoint(base, n)
	if err != nil {
		return vllm.Source{Unusable: err.Error()}
	}
	s := vllm.Source{Endpoint: endpoint}
	switch w.cfg.Replay {
	case NoReplay:
	case "":
		s.Replay = vllm.ReplayBeside(base, host, replayOffset+n)
	default:
		// A replay that cannot be had makes the cache state a lower bound.
		s.Replay, _ = vllm.RankEndpoint(w.cfg.Replay, n)
	}
	return s
}

// samePort says that two endpoints may be one socket under two names.
func samePort(a, b string) bool {
	port := func(endpoint string) string { return endpoint[strings.LastIndexByte(endpoint, ':')+1:] }
	return a == b || strings.HasPrefix(a, "tcp://") && strings.HasPrefix(b, "tcp://") && port(a) == port(b)
}
