package intake

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestHeaderAndBodyKeyNameOneSession(t *testing.T) {
	s, err := NewSessions("x-session-id, X-Chat", "session_id,extra_body.decode_id,metadata.a.b")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name    string
		headers map[string]string
		body    string
		want    string
	}{
		{"nothing", nil, "", ""},
		{"a header in any case", map[string]string{"X-Session-ID": "42"}, "", "42"},
		{"a field", nil, `{"prompt":"p","session_id":"42"}`, "42"},
		{"a number", nil, `{"session_id": 42 }`, "42"},
		{"a field in a field", nil, `{"extra_body":{"x":[1,{"decode_id":"no"}],"decode_id":"42"}}`, "42"},
		{"two fields deep", nil, `{"metadata":{"a":{"b":"42"}}}`, "42"},
		{"escapes", nil, `{"session\u005fid":"4\u0032"}`, "42"},
		{"headers before fields", map[string]string{"x-chat": "42"}, `{"session_id":"7"}`, "42"},
		{"in the order of the setting", map[string]string{"x-chat": "7", "x-session-id": "42"}, `{"extra_body":{"decode_id":"8"}}`, "42"},
		{"an empty header is none", map[string]string{"x-session-id": ""}, `{"session_id":"","extra_body":{"decode_id":42}}`, "42"},
		{"equal names in other cases", map[string]string{"X-SESSION-ID": "42", "X-Session-Id": "7"}, "", "42"},
		{"the last of equal fields", nil, `{"session_id":"7","session_id":"42"}`, "42"},
		{"what names nothing", nil, `{"session_id":null,"metadata":"text","extra_body":{"decode_id":{"decode_id":1}}}`, ""},
		{"true is no name", nil, `{"session_id":true}`, ""},
		{"not asked for", map[string]string{"session_id": "7", "": "8"}, `{"x-session-id":"7","decode_id":"8"}`, ""},
	} {
		if got := s.Of(c.headers, []byte(c.body)); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestNamesOfSessionsAreChecked(t *testing.T) {
	for _, c := range []struct{ headers, fields, want string }{
		{"a,,b", "", "empty"}, {"a b", "", "no name"}, {"a:b", "", "no name"}, {"ä", "", "no name"}, {" ", "", "empty"},
		{"", "a..b", "empty"}, {"", ".a", "empty"}, {"", "a.", "empty"},
		{strings.Repeat("a,", 16) + "a", "", "at most 16"}, {"", strings.Repeat("a", 257), "at most 256"},
	} {
		if _, err := NewSessions(c.headers, c.fields); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q, %q: %v, want %q", c.headers, c.fields, err, c.want)
		}
	}
}

// Whatever valid JSON a body is, asking it for its session ends well.
func TestAnyBodyMayBeAskedForItsSession(t *testing.T) {
	s, err := NewSessions("", "a,a.a,a.a.a,b.a")
	if err != nil {
		t.Fatal(err)
	}
	value := rapid.Deferred(func() *rapid.Generator[string] { return jsonValue(3) })
	rapid.Check(t, func(t *rapid.T) {
		body := value.Draw(t, "body")
		if got := s.Of(nil, []byte(body)); got != "" && got != "x" && got != "-1e3" {
			t.Errorf("%s: %q", body, got)
		}
	})
}

func jsonValue(depth int) *rapid.Generator[string] {
	leaf := rapid.SampledFrom([]string{`"x"`, `""`, "-1e3", "null", "true", "[]", "{}", `"}\"{"`})
	if depth == 0 {
		return leaf.Filter(func(s string) bool { return s != `"}\"{"` })
	}
	return rapid.Custom(func(t *rapid.T) string {
		var members []string
		for range rapid.IntRange(0, 3).Draw(t, "members") {
			name := rapid.SampledFrom([]string{`"a"`, `"b"`, `"c"`}).Draw(t, "name")
			v := jsonValue(depth-1).Draw(t, "value")
			if v == `"}\"{"` {
				name = `"c"`
			}
			members = append(members, name+" :\n"+v)
		}
		return "{" + strings.Join(members, " , ") + "}"
	})
}

func TestSessionsThatNobodyAsksForCostNothing(t *testing.T) {
	i := New(Config{})
	defer i.Close()
	headers, body := map[string]string{"x-session-id": "42"}, []byte(`{"session_id":"42"}`)
	if n := testing.AllocsPerRun(100, func() {
		if i.Session(headers, body) != "" {
			t.Fatal("a session that was not asked for")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
