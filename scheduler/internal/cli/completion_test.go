package cli

import (
	"os/exec"
	"strings"
	"testing"
)

// TestCompletion in a real bash, and in the others as far as they are there.
func TestCompletion(t *testing.T) {
	script := func(shell string) string {
		got := invoke(t.Context(), 0, nil, "", "completion", shell)
		if got.code != 0 || got.out == "" {
			t.Fatalf("%s: %+v", shell, got)
		}
		return got.out
	}
	run := func(shell, script string, args ...string) (string, bool) {
		t.Helper()
		if _, err := exec.LookPath(shell); err != nil {
			t.Logf("there is no %s here", shell)
			return "", false
		}
		command := exec.Command(shell, args...)
		command.Stdin = strings.NewReader(script)
		out, err := command.CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v: %s", shell, err, out)
		}
		return strings.Join(strings.Fields(string(out)), " "), true
	}
	for typed, want := range map[string]string{
		"ex":                 "explain",
		"members -s":         "-scheduler -sort",
		"members -sort ":     "id load kv trust",
		"explain -as t":      "tokens text",
		"doctor -o j":        "json",
		"completion ":        "bash zsh fish",
		"top -int":           "-interval",
		"nonsense -":         "",
		"explain -model x -": "-adapter -as -compare -model -o -policy -request-id -scheduler -session -tenant -timeout -tls -tls-ca -tls-cert -tls-key -tls-name",
	} {
		words := strings.Split("kvscout "+typed, " ")
		ask := script("bash") + "\nCOMP_WORDS=('" + strings.Join(words, "' '") + "')\nCOMP_CWORD=" + string(rune('0'+len(words)-1)) + "\n_kvscout\necho \"${COMPREPLY[@]}\"\n"
		if got, there := run("bash", ask); there && got != want {
			t.Errorf("%q: bash offers %q, want %q", typed, got, want)
		}
	}
	run("zsh", script("zsh"), "-n", "/dev/stdin")
	if got, there := run("fish", script("fish")+"\ncomplete -C 'kvscout members -sort '\n"); there && !strings.HasPrefix(got, "id ") {
		t.Errorf("fish offers %q", got)
	}
}
