package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvscout/kvscout/e2e/fakevllm"
)

// tokenizerOfBytes makes a tokenizer, one token a byte, in a folder: any other would
// have to be downloaded.
const tokenizerOfBytes = `
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
t = Tokenizer(models.BPE({c: i for i, c in enumerate(letters + ["<end>"])}, []))
t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<end>", eos_token="<end>", pad_token="<end>").save_pretrained(sys.argv[1])
`

// aiperf is the real AIPerf and a cache of models as Hugging Face's client keeps it,
// which holds its tokenizer.
type aiperf struct{ program, models, tokenizer string }

func needAIPerf(t *testing.T) aiperf {
	t.Helper()
	a := aiperf{program: needProgram(t, "AIPerf", "AIPERF", "aiperf", "make aiperf"), models: t.TempDir(), tokenizer: "kvscout/bytes"}
	// By its path a tokenizer is not found by the processes that make a trace's prompts.
	model := filepath.Join(a.models, "hub/models--kvscout--bytes")
	write(t, filepath.Join(model, "refs/main"), "1")
	said, err := exec.Command(filepath.Join(filepath.Dir(a.program), "python3"), "-c", tokenizerOfBytes, filepath.Join(model, "snapshots/1")).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	return a
}

// run runs a command line of AIPerf's to its end: so many requests, and no error.
func (a aiperf) run(t *testing.T, words []string, requests float64) {
	t.Helper()
	folder := t.TempDir()
	cmd := exec.CommandContext(t.Context(), a.program, append(words, "--tokenizer", a.tokenizer, "--ui", "none", "--artifact-dir", folder)...)
	cmd.Dir, cmd.WaitDelay = folder, patience
	cmd.Env = append(os.Environ(), "HF_HOME="+a.models, "HF_HUB_OFFLINE=1", "HOME="+folder)
	said, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, said)
	}
	type metric struct{ Avg float64 }
	var result struct {
		Answered  metric            `json:"request_count"`
		Ended     metric            `json:"completed_request_count"`
		First     metric            `json:"time_to_first_token"`
		Cancelled bool              `json:"was_cancelled"`
		Errors    []json.RawMessage `json:"error_summary"`
	}
	if err := json.Unmarshal([]byte(read(t, filepath.Join(folder, "profile_export_aiperf.json"))), &result); err != nil {
		t.Fatal(err)
	}
	if result.Answered.Avg != requests || result.Ended.Avg != requests || result.First.Avg <= 0 || result.Cancelled || len(result.Errors) > 0 {
		t.Errorf("%v: want %v requests without an error: %+v\n%s", cmd.Args, requests, result, said)
	}
}

// TestAIPerf runs the commands of docs/PROXIES.md, with fewer requests: those of a
// benchmark client that others wrote. Each request is picked for, and none fails.
func TestAIPerf(t *testing.T) {
	a := needAIPerf(t)
	const requests = 60
	var trace strings.Builder
	for i := range requests { // each begins as every third does
		fmt.Fprintf(&trace, `{"timestamp":%d,"input_length":1200,"output_length":20,"hash_ids":[%d,%d,%d]}`+"\n", 50*i, i%3, 100+2*i, 101+2*i)
	}
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	write(t, file, trace.String())
	page := strings.ReplaceAll(read(t, "../docs/PROXIES.md"), "\\\n", "")
	var commands []string
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, "    aiperf profile ") {
			commands = append(commands, line)
		}
	}
	if len(commands) != 2 {
		t.Fatalf("docs/PROXIES.md has the commands %q, want a chat and a trace", commands)
	}
	for _, r := range []reverseProxy{throughGateway(t), throughEnvoy} {
		t.Run(r.name, func(t *testing.T) {
			if r.need != nil {
				r.need(t)
			}
			cfg := fakevllm.Config{Speedup: 20, ScaleOut: true}
			x := r.before(t, r.site(t), nil, cfg, cfg)
			var all fakevllm.Counters
			for _, command := range commands {
				command = strings.NewReplacer("MODEL", model, "http://PROXY:8080", x.url, "TRACE.jsonl", file, "--request-count 2000", fmt.Sprint("--request-count ", requests)).Replace(command)
				a.run(t, strings.Fields(command)[1:], requests)
				x.free()
				before := all
				all = fakevllm.Counters{}
				for _, e := range x.engines {
					counted := e.State(0).Counters
					all.Finished, all.Hits, all.Queries = all.Finished+counted.Finished, all.Hits+counted.Hits, all.Queries+counted.Queries
				}
				if all.Finished-before.Finished != requests || all.Hits == before.Hits {
					t.Errorf("%s\nended %d requests with %d cached tokens, want %d with some", command, all.Finished-before.Finished, all.Hits-before.Hits, requests)
				}
				t.Logf("%d of %d tokens were cached", all.Hits-before.Hits, all.Queries-before.Queries)
			}
			if n := x.counted(x.Admin, "kvscout_scheduler_decisions_total", `method="pick"`); n != float64(requests*len(commands)) {
				t.Errorf("%v requests were picked for, want %d", n, requests*len(commands))
			}
			x.checked()
		})
	}
}

// needProgram is the path of a program: the one that the variable names, or that of
// the usual name. Without it a test is skipped, unless KVSCOUT_REQUIRE_ and the
// program's name say that it must be there.
func needProgram(t *testing.T, name, variable, usual, hint string) string {
	t.Helper()
	program := os.Getenv(variable)
	if program == "" {
		program = usual
	}
	path, err := exec.LookPath(program)
	if err == nil {
		return path
	}
	if os.Getenv("KVSCOUT_REQUIRE_"+strings.ToUpper(name)) != "" {
		t.Fatalf("no %s: %v", name, err)
	}
	t.Skipf("skipped: no %s: %s (%v)", name, hint, err)
	return ""
}
