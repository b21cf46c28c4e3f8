package completion

import (
	"encoding/json"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const (
	counts  = `"usage":{"prompt_tokens":1000,"total_tokens":1007,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":992}}`
	chat    = `{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"content":"\"usage\": {\"prompt_tokens\": 3} \\"}}],` + counts + `,"kv_transfer_params":null}`
	role    = `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"","tool_calls":[]},"finish_reason":null}],"usage":null}` + "\n\n"
	content = `data: {"choices":[{"index":0,"delta":{"content":"usage"},"finish_reason":null}],"usage":null}` + "\n\n"
	last    = `data: {"choices":[],` + counts + "}\n\n"
	inputs  = `"usage":{"input_tokens":1000,"input_tokens_details":{"cached_tokens":992},"output_tokens":7,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":1007}`
	created = "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"r\",\"status\":\"in_progress\",\"error\":null,\"usage\":null}}\n\n"
	delta   = "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"x\"}\n\n"
	ended   = "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"r\",\"output\":[{\"usage\":{\"input_tokens\":3}}]," + inputs + ",\"x\":1},\"sequence_number\":9}\n\n"
	done    = "data: [DONE]\n\n"
)

func cached(n uint32) *Usage {
	return &Usage{PromptTokens: 1000, OutputTokens: 7, CachedTokens: &n}
}

func TestAnswersAreRead(t *testing.T) {
	events := "text/event-stream; charset=utf-8"
	for name, c := range map[string]struct {
		kind, body    string
		begun, failed bool
		usage         *Usage
	}{
		"json":                 {"application/json", chat, false, false, cached(992)},
		"spaces":               {"application/json", " {\n\t" + strings.ReplaceAll(counts, ":", " : ") + " }\n", false, false, cached(992)},
		"nested usage":         {"application/json", `{"a":{` + counts + `}}`, false, false, nil},
		"no details":           {"application/json", `{"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":null}}`, false, false, &Usage{PromptTokens: 5, OutputTokens: 2}},
		"cut off":              {"application/json", chat[:len(chat)-60], false, false, nil},
		"long usage":           {"application/json", `{"usage":{"x":"` + strings.Repeat("x", maxUsage) + `","prompt_tokens":3}}`, false, false, nil},
		"negative":             {"application/json", `{"usage":{"prompt_tokens":-3}}`, false, false, nil},
		"usage is no object":   {"application/json", `{"usage":[1]}`, false, false, nil},
		"html":                 {"text/html", "<html>}}}]]]{{</html>", false, false, nil},
		"events":               {events, role + content + last + done, true, false, cached(992)},
		"events with CR":       {events, strings.ReplaceAll(role+content+last+done, "\n", "\r\n"), true, false, cached(992)},
		"role alone":           {events, role, false, false, nil},
		"text":                 {events, `data:{"choices":[{"text":"a"}]}` + "\n\n", true, false, nil},
		"empty text":           {events, `data:{"choices":[{"text":"","finish_reason":null}]}` + "\n\n", false, false, nil},
		"ended at once":        {events, `data:{"choices":[{"text":"","finish_reason":"stop"}]}` + "\n\n", true, false, nil},
		"tool call":            {events, `data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}` + "\n\n", true, false, nil},
		"long choices":         {events, `data: {"choices":[{"x":"` + strings.Repeat("x", maxChoices) + `"}]}` + "\n\n", true, false, nil},
		"other fields":         {events, ": comment {\nid: {\nevent: message\nretry: 5\n" + last, false, false, cached(992)},
		"data on two lines":    {events, "data: {" + counts + ",\ndata: \"x\":1}\n\n", false, false, cached(992)},
		"event after garbage":  {events, "data: {{{{[\n\n" + last, false, false, cached(992)},
		"error":                {events, content + `data: {"error":{"message":"engine died","code":500}}` + "\n\n" + done, true, true, nil},
		"no error":             {events, `data: {"error":null,"choices":[]}` + "\n\n", false, false, nil},
		"usage in every event": {events, strings.ReplaceAll(content, `"usage":null`, `"usage":{"prompt_tokens":1}`) + last, true, false, cached(992)},
		"response":             {"application/json", `{"object":"response","output":[{` + counts + `}],` + inputs + `}`, false, false, cached(992)},
		"response, events":     {events, created + delta + ended, true, false, cached(992)},
		"response, created":    {events, created, false, false, nil},
		"response, no text":    {events, created + `data: {"type":"x.delta","delta":""}` + "\n\n" + ended, false, false, cached(992)},
		"response failed":      {events, created + `data: {"type":"response.failed","response":{"error":{"code":"x"}}}` + "\n\n", false, true, nil},
		"response, an error":   {events, `data: {"type":"error","message":"x"}` + "\n\n", false, true, nil},
		"response is a text":   {events, `data: {"response":"{` + strings.ReplaceAll(inputs, `"`, `\"`) + `}"}` + "\n\n", false, false, nil},
		"nothing":              {"", "", false, false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			for cut := range len(c.body) + 1 {
				if len(c.body) > 1000 && cut > 50 && cut < len(c.body)-50 {
					continue
				}
				a := New(c.kind)
				a.Take([]byte(c.body[:cut]))
				a.Take([]byte(c.body[cut:]))
				if d := cmp.Diff(c.usage, a.Usage()); d != "" || a.Begun() != c.begun || a.Failed() != c.failed {
					t.Fatalf("cut at %d: begun %t, failed %t, usage %s", cut, a.Begun(), a.Failed(), d)
				}
			}
		})
	}
}

// A client that did not ask for usage gets all but that, in whole events.
func TestUsageIsHidden(t *testing.T) {
	const (
		both  = `data: {"choices":[{"text":"x"}],"usage":{"prompt_tokens":1}}` + "\n\n"
		nulls = `data: {"choices":[],"usage":null}` + "\n\n"
	)
	long := `data: {"choices":[{"text":"` + strings.Repeat("x", 2*maxHeld) + `"}]}` + "\n\n"
	longUsage := `data: {"choices":[],"usage":{"prompt_tokens":1},"x":"` + strings.Repeat("x", 2*maxHeld) + `"}` + "\n\n"
	for name, c := range map[string]struct{ body, want string }{
		"usage at the end":   {role + content + last + done, role + content + done},
		"with CR":            {strings.ReplaceAll(role+content+last+done, "\n", "\r\n"), strings.ReplaceAll(role+content+done, "\n", "\r\n")},
		"usage beside text":  {both + nulls + done, both + nulls + done},
		"no usage":           {content + done, content + done},
		"no end":             {content + "data: [DO", content + "data: [DO"},
		"no end of usage":    {content + last[:20], content + last[:20]},
		"a long event":       {long + last + done, long + done},
		"usage with the sky": {longUsage + done, longUsage + done},
		"comments":           {": ping\n\n\n\n" + last + ": ping\n\n", ": ping\n\n\n\n: ping\n\n"},
	} {
		for _, n := range []int{1, 7, 100, len(c.body)} {
			a := New("text/event-stream")
			var passed []byte
			for piece := range slices.Chunk([]byte(c.body), n) {
				passed = append(passed, a.Pass(piece)...)
			}
			passed = append(passed, a.Rest()...)
			if d := cmp.Diff(c.want, string(passed)); d != "" {
				t.Errorf("%s in pieces of %d: %.500s", name, n, d)
			}
		}
	}
	a := New("application/json")
	if got := string(a.Pass([]byte(chat))) + string(a.Rest()); got != chat || a.Usage() == nil {
		t.Errorf("%s", got)
	}
}

func TestRequestsThatHideUsage(t *testing.T) {
	for body, want := range map[string]bool{
		`{"stream":true}`:                                      true,
		`{ "stream" : true , "prompt":"}" }`:                   true,
		`{"stream":true,"stream_options":null}`:                true,
		`{"stream_options":null,"prompt":[1,2],"stream":true}`: true,
		`{"stream":false}`:                                     false,
		`{"stream":null}`:                                      false,
		`{"stream":"true"}`:                                    false,
		`{}`:                                                   false,
		`{"a":{"stream":true}}`:                                false,
		`{"stream":true,"stream_options":{"include_usage":true}}`:         false,
		`{"stream":true,"stream_options":{"include_usage":false}}`:        false,
		`{"prompt":"\\\"stream\":true","x":["stream",true,{"stream":1}]}`: false,
	} {
		for _, n := range []int{1, 5, len(body)} {
			var r Request
			for piece := range slices.Chunk([]byte(body), n) {
				r.Take(piece)
			}
			if r.HidesUsage() != want {
				t.Errorf("%s in pieces of %d: %t", body, n, !want)
			}
		}
		if !want {
			continue
		}
		changed := With([]byte(body), WantsUsage)
		var r struct {
			Stream  bool `json:"stream"`
			Options struct {
				IncludeUsage bool `json:"include_usage"`
			} `json:"stream_options"`
		}
		if err := json.Unmarshal(changed, &r); err != nil || !r.Stream || !r.Options.IncludeUsage {
			t.Errorf("%s: %v %+v", changed, err, r)
		}
	}
}

func TestRequestsThatNameAPriority(t *testing.T) {
	for body, want := range map[string]bool{`{"priority":3}`: true, `{"a":1,"priority":-3,"b":2}`: true, `{"priority":null}`: false, `{"x":{"priority":3}}`: false, `[]`: false} {
		var r Request
		if r.Take([]byte(body)); r.NamesPriority() != want {
			t.Errorf("%s: %t", body, !want)
		}
	}
	if got := string(With([]byte("no object"), WantsUsage)); got != "no object" {
		t.Error(got)
	}
}

func TestRequestsNameAModel(t *testing.T) {
	for body, want := range map[string]string{
		`{"model":"m"}`: "m", `{"x":{"model":"n"},"model":"a\"b"}`: `a"b`, `{"model":null}`: "", `{"model":["m"]}`: "",
		`{"model":"m","model":"n"}`: "n", `{"model":"` + strings.Repeat("m", maxModel) + `"}`: "",
	} {
		var r Request
		if r.Take([]byte(body)); r.Model() != want {
			t.Errorf("%.50s: %q", body, r.Model())
		}
	}
	var r Request
	if r.Take(With([]byte(`{"model":"m","prompt":"x"}`), ForModel(`lora "2"`))); r.Model() != `lora "2"` {
		t.Error(r.Model())
	}
}

// The model has the client's name wherever an answer is cut.
func TestModelsAreRenamed(t *testing.T) {
	events := "text/event-stream"
	for name, c := range map[string]struct{ kind, body, want string }{
		"json":          {"application/json", `{"id":"model","model":"lora","x":{"model":"y"}}`, `{"id":"model","model":"m\"","x":{"model":"y"}}`},
		"spaces":        {"application/json", `{ "model" : "lo\"ra" , "x":1 }`, `{ "model" :"m\"", "x":1 }`},
		"last":          {"application/json", `{"model":"lora"}`, `{"model":"m\""}`},
		"none":          {"application/json", `{"choices":[]}`, `{"choices":[]}`},
		"no object":     {"text/html", `<html>`, `<html>`},
		"events":        {events, "event: model\ndata: {\"model\":\"lora\",\"choices\":[]}\n\ndata: [DONE]\n\n", "event: model\ndata: {\"model\":\"m\\\"\",\"choices\":[]}\n\ndata: [DONE]\n\n"},
		"several":       {events, strings.Repeat("data: {\"model\":\"lora\"}\n\n", 2), strings.Repeat("data: {\"model\":\"m\\\"\"}\n\n", 2)},
		"an open event": {events, "data: {\"model\":\"lor", "data: {\"model\":\"m\\\"\""},
	} {
		for cut := range len(c.body) + 1 {
			r := NewRename(c.kind, `m"`)
			if got := string(r.Pass([]byte(c.body[:cut]))) + string(r.Pass([]byte(c.body[cut:]))); got != c.want {
				t.Fatalf("%s, cut at %d: %s", name, cut, got)
			}
		}
	}
}

// An answer may be as long as it wants.
func TestMemoryIsBounded(t *testing.T) {
	for name, piece := range map[string]string{
		"name":   strings.Repeat("n", 1<<20),
		"value":  `usage":"` + strings.Repeat("v", 1<<20),
		"nested": strings.Repeat("[", 1<<20),
	} {
		a := New("application/json")
		a.Take([]byte(`{"`))
		p := []byte(piece)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range 4 {
			a.Take(p)
		}
		runtime.ReadMemStats(&after)
		if grown := after.TotalAlloc - before.TotalAlloc; grown > 256<<10 {
			t.Errorf("%s: 4 MiB took %d bytes", name, grown)
		}
	}
}

// However an answer is cut, the same is read of it, and none is too strange.
func FuzzAnswer(f *testing.F) {
	for _, body := range []string{chat, role + content + last + done, ": x\r\n\r\ndata: {\"error\":1}\n\n", `{"usage":{"a":"\u12`, "{{{}}}]", created + delta + ended} {
		f.Add([]byte(body), true, uint8(3))
		f.Add([]byte(body), false, uint8(1))
	}
	f.Fuzz(func(t *testing.T, body []byte, events bool, size uint8) {
		kind := "application/json"
		if events {
			kind = "text/event-stream"
		}
		whole, pieces := New(kind), New(kind)
		whole.Take(body)
		for piece := range slices.Chunk(body, int(size)+1) {
			pieces.Take(piece)
		}
		say := func(a *Answer) string { return fmt.Sprint(a.Begun(), a.Failed(), cmp.Diff((*Usage)(nil), a.Usage())) }
		if a, b := say(whole), say(pieces); a != b {
			t.Errorf("whole: %s; in pieces: %s", a, b)
		}
		if n := cap(pieces.object.value) + cap(pieces.object.name) + cap(pieces.within.value); n > 4*maxChoices {
			t.Errorf("%d bytes are kept", n)
		}
	})
}

func BenchmarkRequest(b *testing.B) {
	for name, part := range map[string]string{"text": "All that glitters is not gold. ", "tokens": `",12345,67890,"`} {
		body := []byte(`{"model":"m","prompt":["` + strings.Repeat(part, 100_000) + `"],"stream":true}`)
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				var r Request
				r.Take(body)
			}
		})
	}
}

func BenchmarkEvents(b *testing.B) {
	a := New("text/event-stream")
	piece := []byte(content)
	b.SetBytes(int64(len(piece)))
	b.ReportAllocs()
	for b.Loop() {
		a.Take(piece)
	}
}
