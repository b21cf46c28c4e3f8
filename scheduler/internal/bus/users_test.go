package bus

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats-server/v2/server"

	"github.com/kvscout/kvscout/e2e/authority"
	"github.com/kvscout/kvscout/protocol"
)

// TestRightsAreForTheNameThatTheAgentUses gives a host its rights by the name
// that its agent was given.
func TestRightsAreForTheNameThatTheAgentUses(t *testing.T) {
	key, _ := authority.User(t)
	subjects, err := protocol.NewSubjects("default")
	if err != nil {
		t.Fatal(err)
	}
	for _, given := range []string{"prod/ip-10-0-0-1.ec2.internal", "my_team/host_1", "my_team"} {
		users, err := parseUsers("agent "+key+" "+given, subjects)
		if err != nil {
			t.Errorf("%s: %v", given, err)
			continue
		}
		namespace, uid, one := strings.Cut(given, "/")
		id := protocol.Identity(namespace, uid, 0)
		if !one {
			id.PodUID = "*"
		}
		want := agentRights(subjects, id.Namespace+"_"+id.PodUID+"_*")
		if diff := cmp.Diff(want, users[0].Permissions); diff != "" {
			t.Errorf("%s: %s", given, diff)
		}
	}
}

// TestDocumentedServerGivesTheSameRights as the embedded one.
func TestDocumentedServerGivesTheSameRights(t *testing.T) {
	page, err := os.ReadFile("../../../docs/SECURITY.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(page), "```conf\n")
	text, _, _ = strings.Cut(text, "```")
	// The files it names are not here.
	_, rest, _ := strings.Cut(text, "authorization {")
	text = "authorization {" + rest
	var opts server.Options
	if err := opts.ProcessConfigString(text); err != nil {
		t.Fatal(err)
	}
	subjects, err := protocol.NewSubjects("default")
	if err != nil {
		t.Fatal(err)
	}
	if len(opts.Nkeys) != 3 {
		t.Fatalf("%d users", len(opts.Nkeys))
	}
	for i, want := range []*server.Permissions{
		schedulerRights(subjects), agentRights(subjects, "prod_*_*"), agentRights(subjects, "prod_0f3c6c1e-6c54-4a2c-9b2e-5e9c0a7d1b11_*"),
	} {
		if diff := cmp.Diff(want, opts.Nkeys[i].Permissions); diff != "" {
			t.Errorf("user %d: %s", i, diff)
		}
	}
	// The file of users on the same page is one.
	_, text, _ = strings.Cut(string(page), "# role")
	text, _, _ = strings.Cut(text, "```")
	if users, err := parseUsers("# "+text, subjects); err != nil || len(users) != 3 {
		t.Errorf("%d users: %v", len(users), err)
	}
}
