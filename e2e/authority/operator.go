package authority

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"
)

// Operator signs one account of NATS, whose signing keys have roles.
type Operator struct {
	key, account nkeys.KeyPair
	claims       *jwt.AccountClaims
}

// NewOperator makes an operator for the time of a test.
func NewOperator(t testing.TB) *Operator {
	t.Helper()
	o := &Operator{key: create(t, nkeys.CreateOperator), account: create(t, nkeys.CreateAccount)}
	o.claims = jwt.NewAccountClaims(public(t, o.account))
	return o
}

// Template is what users of a role may do.
type Template struct {
	Publish, Subscribe []string
	Answers            int // to each request, within a minute
}

// Role is a signing key whose users have the rights of a template.
type Role struct {
	key     nkeys.KeyPair
	account string
}

// Role adds one to the account.
func (o *Operator) Role(t testing.TB, rights Template) Role {
	t.Helper()
	r := Role{key: create(t, nkeys.CreateAccount), account: public(t, o.account)}
	scope := jwt.NewUserScope()
	scope.Key = public(t, r.key)
	scope.Template.Pub.Allow = rights.Publish
	scope.Template.Sub.Allow = rights.Subscribe
	if rights.Answers > 0 {
		scope.Template.Resp = &jwt.ResponsePermission{MaxMsgs: rights.Answers, Expires: time.Minute}
	}
	o.claims.SigningKeys.AddScopedSigner(scope)
	return r
}

// User makes credentials, in a file.
func (r Role) User(t testing.TB, name string, tags ...string) string {
	t.Helper()
	key := create(t, nkeys.CreateUser)
	claims := jwt.NewUserClaims(public(t, key))
	claims.Name, claims.IssuerAccount = name, r.account
	claims.Tags.Add(tags...)
	claims.SetScoped(true)
	token, err := claims.Encode(r.key)
	if err != nil {
		t.Fatal(err)
	}
	seed, err := key.Seed()
	if err != nil {
		t.Fatal(err)
	}
	text, err := jwt.FormatUserConfig(token, seed)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "user.creds")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// Server is the options of a server that obeys the operator, with the roles
// that the account has by now.
func (o *Operator) Server(t testing.TB) *server.Options {
	t.Helper()
	account, err := o.claims.Encode(o.key)
	if err != nil {
		t.Fatal(err)
	}
	resolver := &server.MemAccResolver{}
	if err := resolver.Store(o.claims.Subject, account); err != nil {
		t.Fatal(err)
	}
	self := jwt.NewOperatorClaims(public(t, o.key))
	text, err := self.Encode(o.key)
	if err != nil {
		t.Fatal(err)
	}
	if self, err = jwt.DecodeOperatorClaims(text); err != nil {
		t.Fatal(err)
	}
	return &server.Options{TrustedOperators: []*jwt.OperatorClaims{self}, AccountResolver: resolver}
}

func create(t testing.TB, kind func() (nkeys.KeyPair, error)) nkeys.KeyPair {
	t.Helper()
	key, err := kind()
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func public(t testing.TB, key nkeys.KeyPair) string {
	t.Helper()
	text, err := key.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	return text
}
