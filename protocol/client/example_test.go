package client_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"

	"google.golang.org/grpc"

	"github.com/kvscout/kvscout/protocol/client"
	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

// Example is a proxy's part: the body decides where the request goes, an engine
// that cannot be reached gives way to another, and round robin stands in while no
// scheduler answers.
func Example() {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"choices":[]}`) }))
	defer engine.Close()
	address := strings.TrimPrefix(engine.URL, "http://")
	scheduler, stop := schedulerFor("127.0.0.1:1", address) // nobody listens at the first
	defer stop()

	c, err := client.New(client.Config{Schedulers: []string{scheduler}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()

	body := `{"model":"m","prompt":"The quick brown fox"}`
	ownChoice := func(tried []string) string { return address } // as without kvscout
	err = c.Do(context.Background(), &api.Request{Prompt: api.Body(body)}, ownChoice,
		func(ctx context.Context, p *client.Placement) (*api.Report, error) {
			request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+p.Address+"/v1/completions", strings.NewReader(body))
			if err != nil {
				return nil, err
			}
			answer, err := http.DefaultClient.Do(request)
			if err != nil {
				fmt.Println("not reached, try another")
				return nil, client.Another(err)
			}
			defer answer.Body.Close()
			p.FirstToken()
			text, err := io.ReadAll(answer.Body)
			fmt.Println("served:", string(text))
			return nil, err
		})
	if err != nil {
		fmt.Println(err)
	}
	// Output:
	// not reached, try another
	// served: {"choices":[]}
}

// schedulerFor stands for a real scheduler: it picks the first of the members that
// is not excluded.
func schedulerFor(members ...string) (address string, stop func()) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	server := grpc.NewServer()
	api.RegisterSchedulerServer(server, &picker{members: members})
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(l) }()
	return l.Addr().String(), func() { server.Stop(); <-done; http.DefaultClient.CloseIdleConnections() }
}

type picker struct {
	api.UnimplementedSchedulerServer
	members []string
}

func (p *picker) Pick(_ context.Context, r *api.PickRequest) (*api.PickResponse, error) {
	member := p.members[len(r.GetRequest().GetExclude())]
	return &api.PickResponse{DecisionId: member, Ranking: &api.Ranking{Candidates: []*api.Candidate{{Member: &api.Member{Address: member}}}}}, nil
}

func (p *picker) Report(context.Context, *api.ReportRequest) (*api.ReportResponse, error) {
	return &api.ReportResponse{}, nil
}
