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
