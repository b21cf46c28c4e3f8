package agent

import (
	"fmt"
	"log/slog"
	"net/url"
	"strings"
)

// String is the configuration without its secrets.
func (c Config) String() string {
	type plain Config // without this method
	p := plain(c)
	p.NATSURL, p.Engine = redacted(c.NATSURL), redacted(c.Engine)
	if c.EngineAPIKey != "" {
		p.EngineAPIKey = "REDACTED"
	}
	p.Log = nil
	return fmt.Sprintf("%+v", p)
}

// GoString is String.
func (c Config) GoString() string { return c.String() }

// LogValue is String.
func (c Config) LogValue() slog.Value { return slog.StringValue(c.String()) }

// redacted is a list of URLs without user and password.
func redacted(urls string) string {
	var out []string
	for part := range strings.SplitSeq(urls, ",") {
		u, err := url.Parse(strings.TrimSpace(part))
		if err != nil {
			continue
		}
		u.User = nil
		out = append(out, u.String())
	}
	return strings.Join(out, ",")
}
