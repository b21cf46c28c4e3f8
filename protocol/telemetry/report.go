package telemetry

import (
	"context"
	"log/slog"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel"
)

// report has OpenTelemetry say in the log what goes wrong inside it. This is
// global, because OpenTelemetry has one place for it: the last call counts.
func report(log *slog.Logger) {
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		log.Warn("telemetry", "error", err)
	}))
	otel.SetLogger(logr.FromSlogHandler(verbosity{log.Handler()}))
}

// verbosity gives OpenTelemetry's levels their meaning: 1 is a warning, 4 and 8
// are details.
type verbosity struct{ slog.Handler }

func (v verbosity) level(l slog.Level) slog.Level {
	switch {
	case l >= slog.LevelError:
		return slog.LevelError
	case l >= -1:
		return slog.LevelWarn
	}
	return slog.LevelDebug
}

// Enabled implements slog.Handler.
func (v verbosity) Enabled(ctx context.Context, l slog.Level) bool {
	return v.Handler.Enabled(ctx, v.level(l))
}

// Handle implements slog.Handler.
func (v verbosity) Handle(ctx context.Context, r slog.Record) error {
	r.Level = v.level(r.Level)
	return v.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (v verbosity) WithAttrs(attrs []slog.Attr) slog.Handler {
	return verbosity{v.Handler.WithAttrs(attrs)}
}

// WithGroup implements slog.Handler.
func (v verbosity) WithGroup(name string) slog.Handler { return verbosity{v.Handler.WithGroup(name)} }
