package agent

import (
	"fmt"
	"log/slog"

	"github.com/kvscout/kvscout/protocol/settings"
)

// String is the configuration without its secrets.
func (c Config) String() string {
	type plain Config // without this method
	p := plain(c)
	p.NATSURL, p.Engine = settings.RedactURLs(c.NATSURL), settings.RedactURLs(c.Engine)
	p.EngineAPIKey = settings.Secret(c.EngineAPIKey)
	p.Log = nil
	return fmt.Sprintf("%+v", p)
}

// GoString is String.
func (c Config) GoString() string { return c.String() }

// LogValue is String.
func (c Config) LogValue() slog.Value { return slog.StringValue(c.String()) }
