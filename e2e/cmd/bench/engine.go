package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/kvscout/kvscout/e2e/fakevllm"
)

const (
	model     = "bench"
	blockSize = 16
	pool      = "bench"
	pod       = "engine"
	member    = "default_" + pod + "_0"
	// poolBlocks are what the engine's cache holds at a time.
	poolBlocks = 20000
	// inFlight is how many event batches may wait for the agent.
	inFlight = 1000
)

// engine is what an agent sees of one: events, and the HTTP endpoints that say
// what it is.
type engine struct {
	publisher *fakevllm.Publisher
	server    *http.Server
	address   string
	cancel    context.CancelFunc
	group     sync.WaitGroup
}

func startEngine(ctx context.Context) (*engine, error) {
	p, err := fakevllm.NewPublisher(fakevllm.PublisherConfig{ReplayEndpoint: "tcp://127.0.0.1:0"})
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", local)
	if err != nil {
		p.Close()
		return nil, err
	}
	e := &engine{publisher: p, address: "http://" + listener.Addr().String()}
	say := func(text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, text) }
	}
	sources, err := json.Marshal(map[string]any{"0": map[string]any{
		"enable_kv_cache_events": true, "publisher": "zmq", "topic": "",
		"endpoint": p.Endpoint(), "replay_endpoint": p.ReplayEndpoint(),
	}})
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("GET /health", say(""))
	mux.Handle("GET /version", say(`{"version":"0.32.0"}`))
	mux.Handle("GET /v1/models", say(fmt.Sprintf(`{"object":"list","data":[{"id":%q,"object":"model","root":%[1]q,"parent":null}]}`, model)))
	mux.Handle("GET /kv_event_sources", say(string(sources)))
	mux.Handle("GET /metrics", say(fmt.Sprintf(
		"vllm:cache_config_info{block_size=\"%d\",num_gpu_blocks=\"%d\",enable_prefix_caching=\"True\",engine=\"0\"} 1.0\n", blockSize, poolBlocks+1)))
	e.server = &http.Server{Handler: mux, ReadHeaderTimeout: time.Second}
	ctx, e.cancel = context.WithCancel(ctx)
	e.group.Go(func() { _ = e.server.Serve(listener) })
	e.group.Go(func() { _ = p.Run(ctx) })
	return e, nil
}

func (e *engine) stop() {
	e.cancel()
	e.server.Close()
	e.group.Wait()
}

// publish sends a batch as soon as the agent is not too far behind.
func (e *engine) publish(ctx context.Context, payload []byte) error {
	for {
		st := e.publisher.Stats()
		switch {
		case st.Dropped > 0:
			return fmt.Errorf("the engine dropped %d batches", st.Dropped)
		case st.Subscribers == 0:
			return errors.New("the agent has hung up")
		case st.Pending < inFlight:
			e.publisher.Publish(payload)
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		}
		time.Sleep(time.Millisecond)
	}
}
