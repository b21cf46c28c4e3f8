package protocol

import (
	"strings"
	"testing"
)

func TestMemberNameLeadsBackToItsParts(t *testing.T) {
	for _, m := range []Member{
		{"default", "2f3c1f0e-8a70-4f6e-9b0f-0a1b2c3d4e5f", 0},
		{"prod", "host_with_underscores", 7},
		{"a", "b", 4294967295},
	} {
		name, err := m.Name()
		if err != nil {
			t.Fatal(err)
		}
		got, err := ParseMember(name)
		if err != nil || got != m {
			t.Errorf("ParseMember(%q) = %v, %v", name, got, err)
		}
	}
}

func TestIdentityIsAlwaysAName(t *testing.T) {
	long := strings.Repeat("x", 300)
	seen := make(map[string]string)
	for _, given := range []string{
		"ip-10-0-0-1.ec2.internal", "ip-10-0-0-1-ec2-internal", "ip-10-0-0-1_ec2_internal", "ip-10-0-0-1.ec2-internal",
		"gpu_1", "gpu-1", "gpu.1", "ü", "ö", "a b", "a\nb", "*", ">", "a\xffb", "a\xfeb", long, long + "y", strings.Repeat("ü", 300),
	} {
		m := Identity(given, given, 4294967295)
		name, err := m.Name()
		if err != nil {
			t.Errorf("%q: %v", given, err)
			continue
		}
		if other, taken := seen[name]; taken {
			t.Errorf("%q and %q are both %s", given, other, name)
		}
		seen[name] = given
		if again := Identity(m.Namespace, m.PodUID, m.Rank); again != m {
			t.Errorf("%q: cleaned twice it is %v, not %v", given, again, m)
		}
	}
	for given, want := range map[string]string{
		"2f3c1f0e-8a70-4f6e-9b0f-0a1b2c3d4e5f": "2f3c1f0e-8a70-4f6e-9b0f-0a1b2c3d4e5f", "host_1": "host_1",
		// printf %s ip-10-0-0-1.ec2.internal | sha256sum | cut -c 1-8
		"ip-10-0-0-1.ec2.internal": "ip-10-0-0-1-ec2-internal-f8d80228",
	} {
		if got := Identity("default", given, 0).PodUID; got != want {
			t.Errorf("%q became %q, want %q", given, got, want)
		}
	}
}

func TestMemberNameRefusesWhatIsNoToken(t *testing.T) {
	for _, m := range []Member{
		{"", "uid", 0},
		{"ns", "", 0},
		{"ns_", "uid", 0},
		{"n.s", "uid", 0},
		{"ns", "u.id", 0},
		{"ns", "u*", 0},
		{"ns", ">", 0},
		{"ns", "u id", 0},
		{"ns", "u\nid", 0},
		{"ns", "u\x00", 0},
		{"ns", "ü", 0},
		{"ns", strings.Repeat("x", MaxName), 0},
	} {
		if name, err := m.Name(); err == nil {
			t.Errorf("%+v passed as %q", m, name)
		}
	}
}

func TestParseMemberRefuses(t *testing.T) {
	for _, s := range []string{"", "a", "a_b", "_b_0", "a__0", "a_b_", "a_b_x", "a_b_01", "a_b_-1", "a_b_4294967296", "a.b_c_0"} {
		if m, err := ParseMember(s); err == nil {
			t.Errorf("%q passed as %v", s, m)
		}
	}
}

func TestWhoCannotBeAMemberIsStillSpokenTo(t *testing.T) {
	s, err := NewSubjects("default")
	if err != nil {
		t.Fatal(err)
	}
	for subject, want := range map[string]string{
		"kvscout.v1.default.load.a_b.c.0":                               "kvscout.v1.default.verdict.a_b.c.0", // not a_b_c_0's, who is another
		"kvscout.v1.default.blocks.a.b.00":                              "kvscout.v1.default.verdict.a.b.00",
		"kvscout.v1.default.load.a.*.0":                                 "",
		"kvscout.v1.default.load.a.>.0":                                 "",
		"kvscout.v1.default.load.a.b.c.0":                               "",
		"kvscout.v1.default.inbox.a.b.x":                                "",
		"kvscout.v1.other.load.a_b.c.0":                                 "",
		"kvscout.v1.default.load.a.b." + strings.Repeat("0", 2*MaxName): "",
	} {
		got := ""
		if tokens, ok := s.Speaker(subject); ok {
			got = s.Verdict(tokens)
		}
		if got != want {
			t.Errorf("%s: told on %q, want %q", subject, got, want)
		}
	}
}

func TestSubjects(t *testing.T) {
	s, err := NewSubjects("default")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		subject string
		kind    Kind
		member  string
	}{
		{s.Blocks("a_b_0"), Blocks, "a_b_0"},
		{s.Load("a_b_0"), Load, "a_b_0"},
		{s.Snapshot("a_b_0"), Snapshot, "a_b_0"},
		{s.Verdict("a_b_0"), Verdict, "a_b_0"},
		{s.Blocks("a_b_c_0"), Blocks, "a_b_c_0"},
		{"kvscout.v1.default.blocks.a.b.0", Blocks, "a_b_0"},
		{"kvscout.v1.default.blocks.a.b_c.0", Blocks, "a_b_c_0"},
		{"kvscout.v1.default.blocks.a_b.c.0", 0, ""}, // not a's right to speak for b_c
		{"kvscout.v1.default.blocks.a.b.c_0", 0, ""},
		{"kvscout.v1.default.blocks.a.b.0_0", 0, ""},
		{"kvscout.v1.default.blocks.a_b_0", 0, ""},
		{"kvscout.v1.default.blocks.a..0", 0, ""},
		{"kvscout.v1.default.blocks..b.0", 0, ""},
		{"kvscout.v1.default.blocks.a.b.00", 0, ""},
		{"kvscout.v1.other.blocks.a.b.0", 0, ""},
		{"kvscout.v2.default.blocks.a.b.0", 0, ""},
		{"kvscout.v1.default.blocks", 0, ""},
		{"kvscout.v1.default.blocks.a.b.0.x", 0, ""},
		{"kvscout.v1.default.gossip.a.b.0", 0, ""},
		{"kvscout.v1.default.", 0, ""},
	} {
		kind, member, err := s.Parse(c.subject)
		if kind != c.kind || member != c.member || (err == nil) != (c.kind != 0) {
			t.Errorf("Parse(%q) = %v, %q, %v", c.subject, kind, member, err)
		}
	}
	for pattern, want := range map[string]string{
		Any: "kvscout.v1.default.load.*.*.*", "prod_*_*": "kvscout.v1.default.load.prod.*.*", "prod_9_b_*": "kvscout.v1.default.load.prod.9_b.*",
	} {
		if got := s.Load(pattern); got != want {
			t.Errorf("Load(%q) = %s, want %s", pattern, got, want)
		}
	}
	for _, pool := range []string{"", "a.b", "*", ">", "a b", strings.Repeat("p", MaxName+1)} {
		if _, err := NewSubjects(pool); err == nil {
			t.Errorf("pool %q passed", pool)
		}
	}
}
