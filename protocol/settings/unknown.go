package settings

import (
	"flag"
	"regexp"
	"slices"
	"strings"
)

// prefix of every variable.
const prefix = "KVSCOUT_"

// service are the variables that Kubernetes gives every pod for a service of
// its namespace: they are nobody's mistake.
var service = regexp.MustCompile(`_SERVICE_HOST$|_SERVICE_PORT(_|$)|_PORT_[0-9]+_(TCP|UDP|SCTP)(_|$)`)

// Unknown says of each variable that begins like a setting's and is none, what
// was perhaps meant. environ is as os.Environ has it; names in never are read
// by flag alone. Values are not quoted.
func Unknown(fs *flag.FlagSet, environ []string, never ...string) []string {
	var found []string
	for _, pair := range environ {
		variable, value, _ := strings.Cut(pair, "=")
		rest, ours := strings.CutPrefix(variable, prefix)
		if !ours || service.MatchString(variable) || strings.HasSuffix(variable, "_PORT") && strings.Contains(value, "://") {
			continue
		}
		name := strings.ReplaceAll(strings.ToLower(rest), "_", "-")
		f := fs.Lookup(name)
		switch {
		case f != nil && slices.Contains(never, name):
			found = append(found, variable+" is not read: there is only the flag -"+name)
		case f == nil || Variable(name) != variable:
			found = append(found, "there is no setting "+variable+suggest(fs, name, Variable))
		}
	}
	slices.Sort(found)
	return found
}
