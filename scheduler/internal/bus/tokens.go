package bus

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"log/slog"
	"reflect"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"

	"github.com/kvscout/kvscout/protocol"
)

const (
	// authWithin is how long the server waits until a client has said who it is.
	authWithin = 10 * time.Second
	// believedFor is how long the word on a token is not asked for again, refusedFor
	// that it is none.
	believedFor, refusedFor = time.Minute, 10 * time.Second
	// recheckAfter is how long a connection stands before its token is reviewed
	// again: a pod may have been deleted. recheckEach is how often it is looked for them.
	recheckAfter, recheckEach = 2 * time.Minute, time.Second
	// maxReviews may be under way at a time; who has to wait longer than reviewWithin
	// is refused, and tries again.
	maxReviews   = 16
	reviewWithin = 5 * time.Second
	// maxTokens are remembered, and maxToken bytes has one at most.
	maxTokens = 8192
	maxToken  = 16 << 10
)

// Pod is whose token it is.
type Pod struct {
	Namespace, UID string
	Expires        time.Time
}

// Review says whose token it is. An error that is ErrToken means nobody's, any other
// that it cannot be told at present.
type Review func(ctx context.Context, token string) (Pod, error)

// ErrToken says that a token is nobody's who may use the server.
var ErrToken = errors.New("not a pod's token")

// gate decides who may use the embedded server, where pods say who they are by
// tokens, and others by nkeys as in the file of users. It is called by the server.
type gate struct {
	log      *slog.Logger
	subjects protocol.Subjects
	review   Review
	slots    chan struct{} // reviews under way
	ctx      context.Context
	end      context.CancelFunc

	mu      sync.Mutex // guards what follows
	keys    map[string]*server.NkeyUser
	known   map[[sha256.Size]byte]word
	clients map[uint64]client
	stats   TokenStats
}

// word is what is known of a token.
type word struct {
	pod   Pod
	err   error
	until time.Time
}

// client is a connection that was let in, by a token or as the user of a key.
type client struct {
	user    *server.NkeyUser // nil: by a token
	token   string
	pod     Pod
	checked time.Time
}

// TokenStats count tokens by what became of them: those that let a client in, those
// that did not, those that could not be reviewed, and connections that were cut
// because theirs was no longer valid.
type TokenStats struct{ Accepted, Refused, Unknown, Cut uint64 }

func newGate(review Review, subjects protocol.Subjects, log *slog.Logger) *gate {
	g := &gate{log: log, subjects: subjects, review: review, slots: make(chan struct{}, maxReviews),
		known: make(map[[sha256.Size]byte]word), clients: make(map[uint64]client)}
	g.ctx, g.end = context.WithCancel(context.Background())
	return g
}

// use these keys from now on, and return the connections of keys that are no longer
// among them, or have other rights.
func (g *gate) use(users []*server.NkeyUser) map[uint64]client {
	keys := make(map[string]*server.NkeyUser, len(users))
	for _, u := range users {
		keys[u.Nkey] = u
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.keys = keys
	changed := make(map[uint64]client)
	for id, c := range g.clients {
		if c.user != nil && (keys[c.user.Nkey] == nil || !reflect.DeepEqual(keys[c.user.Nkey].Permissions, c.user.Permissions)) {
			changed[id] = c
		}
	}
	return changed
}

// Check lets a client in, with the rights that it has.
func (g *gate) Check(c server.ClientAuthentication) bool {
	o := c.GetOpts()
	if o.Token == "" {
		user := g.byKey(o, c.GetNonce())
		if user == nil {
			return false
		}
		g.enter(c, client{user: user})
		c.RegisterUser(&server.User{Permissions: user.Permissions})
		return true
	}
	pod, err := g.whose(o.Token)
	if err != nil {
		from := ""
		if address := c.RemoteAddress(); address != nil {
			from = address.String()
		}
		g.log.Warn("a token is not accepted", "from", from, "error", err,
			"do", "nothing if it is accepted soon; else see the pod's projected token: its audience, and that the agent reads the file (-nats-token-file)")
		return false
	}
	g.enter(c, client{token: o.Token, pod: pod, checked: time.Now()})
	id := protocol.Identity(pod.Namespace, pod.UID, 0)
	c.RegisterUser(&server.User{Permissions: agentRights(g.subjects, id.Namespace+"_"+id.PodUID+"_*"), ConnectionDeadline: pod.Expires})
	return true
}

func (g *gate) enter(c server.ClientAuthentication, as client) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.clients[c.GetID()] = as
}

// byKey is the user whose nkey has signed the nonce, or nil.
func (g *gate) byKey(o *server.ClientOpts, nonce []byte) *server.NkeyUser {
	g.mu.Lock()
	user := g.keys[o.Nkey]
	g.mu.Unlock()
	if user == nil || len(nonce) == 0 {
		return nil
	}
	signature, err := base64.RawURLEncoding.DecodeString(o.Sig)
	if err != nil {
		if signature, err = base64.StdEncoding.DecodeString(o.Sig); err != nil {
			return nil
		}
	}
	key, err := nkeys.FromPublicKey(o.Nkey)
	if err != nil || key.Verify(nonce, signature) != nil {
		return nil
	}
	return user
}

// whose token it is, as was said lately or is asked for.
func (g *gate) whose(token string) (Pod, error) {
	if len(token) > maxToken {
		return Pod{}, errors.New("it is too long")
	}
	digest, now := sha256.Sum256([]byte(token)), time.Now()
	g.mu.Lock()
	w, is := g.known[digest]
	g.mu.Unlock()
	if is && now.Before(w.until) {
		return w.pod, w.err
	}
	pod, err := g.ask(token)
	now = time.Now()
	if err == nil && !now.Before(pod.Expires) {
		err = ErrToken
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case err == nil:
		g.stats.Accepted++
		w = word{pod: pod, until: now.Add(believedFor)}
		if pod.Expires.Before(w.until) {
			w.until = pod.Expires
		}
	case errors.Is(err, ErrToken):
		g.stats.Refused++
		w = word{err: err, until: now.Add(refusedFor)}
	default:
		g.stats.Unknown++
		return Pod{}, err
	}
	if len(g.known) >= maxTokens {
		for other, was := range g.known {
			if now.After(was.until) {
				delete(g.known, other)
			}
		}
		for other := range g.known {
			if len(g.known) < maxTokens {
				break
			}
			delete(g.known, other)
		}
	}
	g.known[digest] = w
	return w.pod, w.err
}

// ask for a review, when it is this token's turn.
func (g *gate) ask(token string) (Pod, error) {
	ctx, cancel := context.WithTimeout(g.ctx, reviewWithin)
	defer cancel()
	select {
	case g.slots <- struct{}{}:
	case <-ctx.Done():
		return Pod{}, errors.New("too many tokens are reviewed at a time")
	}
	defer func() { <-g.slots }()
	return g.review(ctx, token)
}

// recheck cuts connections whose token is no longer valid, until ctx is done.
func (g *gate) recheck(ctx context.Context, s *server.Server) {
	tick := time.NewTicker(recheckEach)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			for id, c := range g.due(s, now) {
				if _, err := g.whose(c.token); errors.Is(err, ErrToken) {
					g.cutAll(s, map[uint64]client{id: c})
				} else if err != nil {
					break // the next may be told no more
				}
			}
		}
	}
}

// due are the clients whose token is to be reviewed again. Those that are gone are
// forgotten.
func (g *gate) due(s *server.Server, now time.Time) map[uint64]client {
	g.mu.Lock()
	defer g.mu.Unlock()
	found := make(map[uint64]client)
	for id, c := range g.clients {
		switch {
		case s.GetClient(id) == nil:
			delete(g.clients, id)
		case c.user == nil && now.Sub(c.checked) >= recheckAfter:
			c.checked = now
			g.clients[id] = c
			found[id] = c
		}
	}
	return found
}

// cutAll cuts connections whose token or key is not valid any more.
func (g *gate) cutAll(s *server.Server, clients map[uint64]client) {
	for id, c := range clients {
		g.mu.Lock()
		delete(g.clients, id)
		if c.user == nil {
			g.stats.Cut++
		}
		g.mu.Unlock()
		if c.user == nil {
			g.log.Info("a connection is cut: its pod's token is not valid any more", "namespace", c.pod.Namespace, "pod_uid", c.pod.UID)
		}
		_ = s.DisconnectClientByID(id) // it may have gone meanwhile
	}
}

// cutPods cuts the connections of pods that are gone, and forgets their tokens.
func (g *gate) cutPods(s *server.Server, gone func(namespace, uid string) bool) {
	g.mu.Lock()
	found := make(map[uint64]client)
	for id, c := range g.clients {
		if c.user == nil && gone(c.pod.Namespace, c.pod.UID) {
			found[id] = c
			delete(g.known, sha256.Sum256([]byte(c.token)))
		}
	}
	g.mu.Unlock()
	g.cutAll(s, found)
}

func (g *gate) statsNow() TokenStats {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.stats
}
