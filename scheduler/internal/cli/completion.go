package cli

import (
	"context"
	"flag"
	"fmt"
	"strings"
)

// completion is a function, as it reads the list that it stands in.
func completion() command {
	return command{
		name: "completion", does: "a script that completes commands and flags in bash, zsh or fish",
		operand: "bash|zsh|fish", offline: true,
		more: `
  bash  source <(kvscout completion bash)
  zsh   source <(kvscout completion zsh)
  fish  kvscout completion fish | source

`,
		bind: func(*flag.FlagSet) func(context.Context, *session) error { return complete },
	}
}

func complete(_ context.Context, s *session) error {
	shell := ""
	if len(s.args) == 1 {
		shell = s.args[0]
	}
	switch shell {
	case "bash":
		fmt.Fprint(s.Out, bashScript())
	case "zsh":
		fmt.Fprint(s.Out, "autoload -U +X bashcompinit && bashcompinit\n", bashScript())
	case "fish":
		fmt.Fprint(s.Out, fishScript())
	default:
		return misused("kvscout completion bash, zsh or fish")
	}
	return nil
}

// listed are the flags of a command, with their meanings.
func (c *command) listed() (flags []*flag.Flag) {
	fs, _ := c.flags(new(options))
	fs.VisitAll(func(f *flag.Flag) { flags = append(flags, f) })
	return flags
}

// values that a flag takes, where they are few.
var values = map[string]string{"o": "table json", "sort": "id load kv trust", "as": "auto body tokens text"}

func bashScript() string {
	var names []string
	var b strings.Builder
	b.WriteString("_kvscout() {\n  local word=${COMP_WORDS[COMP_CWORD]} last=${COMP_WORDS[COMP_CWORD-1]} list=\n" +
		"  if [ \"$COMP_CWORD\" -gt 1 ]; then case $last in\n")
	for _, name := range []string{"o", "sort", "as"} {
		fmt.Fprintf(&b, "    -%s) COMPREPLY=($(compgen -W '%s' -- \"$word\")); return;;\n", name, values[name])
	}
	b.WriteString("    -tls-ca|-tls-cert|-tls-key) COMPREPLY=($(compgen -f -- \"$word\")); return;;\n  esac; fi\n")
	b.WriteString("  case ${COMP_WORDS[1]} in\n")
	for _, c := range commands() {
		names = append(names, c.name)
		var flags []string
		for _, f := range c.listed() {
			flags = append(flags, "-"+f.Name)
		}
		if c.name == "completion" {
			flags = []string{"bash", "zsh", "fish"}
		}
		fmt.Fprintf(&b, "    %s) list='%s';;\n", c.name, strings.Join(flags, " "))
	}
	fmt.Fprintf(&b, "  esac\n  [ \"$COMP_CWORD\" -gt 1 ] || list='%s'\n", strings.Join(names, " "))
	b.WriteString("  COMPREPLY=($(compgen -W \"$list\" -- \"$word\"))\n}\ncomplete -o default -F _kvscout kvscout\n")
	return b.String()
}

func fishScript() string {
	var b strings.Builder
	for _, c := range commands() {
		fmt.Fprintf(&b, "complete -c kvscout -f -n __fish_use_subcommand -a %s -d %s\n", c.name, quoted(c.does))
		for _, f := range c.listed() {
			takes, usage := flag.UnquoteUsage(f)
			more := ""
			switch {
			case values[f.Name] != "":
				more = " -x -a " + quoted(values[f.Name])
			case takes == "file":
				more = " -r -F"
			case takes != "":
				more = " -x"
			}
			fmt.Fprintf(&b, "complete -c kvscout -n '__fish_seen_subcommand_from %s' -o %s%s -d %s\n", c.name, f.Name, more, quoted(usage))
		}
	}
	b.WriteString("complete -c kvscout -n '__fish_seen_subcommand_from completion' -f -a 'bash zsh fish'\n" +
		"complete -c kvscout -n '__fish_seen_subcommand_from explain score' -F\n")
	return b.String()
}

// quoted is a text for a shell.
func quoted(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }
