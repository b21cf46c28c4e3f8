package serve

import (
	"errors"
	"net/http"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/page"
	"github.com/kvscout/kvscout/scheduler/internal/rest"
)

// writeWait is how long a person may take to read each part of an answer that goes
// on, as members that are watched.
const writeWait = 30 * time.Second

// maxQuestion bounds what a person asks about.
const maxQuestion = 4 << 20

// notHere is what is said where Operators is not set.
const notHere = "this is for whoever may use the API, and at the admin address nobody shows a certificate: " +
	"ask by the command kvscout, which has one"

// people serves the admin address: the page, what of the API it reads, and what
// others made for people. Everybody there may watch the members, whom /v1/members
// lists, and what became of them; what besides is for operators alone is answered where Operators says so.
func (s *Server) people() (http.Handler, error) {
	services := &rest.Local{Unary: s.cfg.unary(), Streams: s.cfg.streams(), Stats: s.cfg.stats()}
	s.register(services)
	questions, err := rest.Handler(rest.Config{
		Services: services, MaxBody: maxQuestion, Caller: person{},
		Longest: writeWait, Served: s.cfg.Observer.Served, Log: s.cfg.Log.With("component", "people"),
	})
	if err != nil {
		return nil, err
	}
	operators := questions
	if !s.cfg.Operators {
		operators = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { rest.Refuse(w, r, notHere) })
	}
	mux := http.NewServeMux()
	mux.Handle("GET /v1/members:watch", patient(questions))
	mux.Handle("GET /v1/changes", questions)
	mux.Handle("GET /v1/history", questions)
	mux.Handle("GET /v1/decision", operators)
	mux.Handle("GET /v1/decisions", operators)
	mux.Handle("POST /v1/explain", operators)
	shown := page.Handler()
	mux.Handle("/page/", shown)
	mux.Handle("/{$}", shown)
	mux.Handle("/", s.cfg.People)
	return mux, nil
}

// patient serves answers that go on: the time to write counts anew for each part.
func patient(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.ServeHTTP(&parts{ResponseWriter: w, control: http.NewResponseController(w)}, r)
	})
}

type parts struct {
	http.ResponseWriter
	control *http.ResponseController
}

func (p *parts) Write(text []byte) (int, error) {
	if err := p.control.SetWriteDeadline(time.Now().Add(writeWait)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return 0, err
	}
	return p.ResponseWriter.Write(text)
}

func (p *parts) Unwrap() http.ResponseWriter { return p.ResponseWriter }
