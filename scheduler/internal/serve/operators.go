package serve

import (
	"context"
	"net/url"
	"slices"
	"strings"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
)

// person is somebody at the admin address, who is asked for no certificate: what
// may be asked there is decided by its path.
type person struct{}

// AuthType implements credentials.AuthInfo.
func (person) AuthType() string { return "admin address" }

// Operators tells who may use the service Admin: callers whose certificate has one
// of the names separated by commas, and people at the admin address. Nil, for none:
// everybody who may call.
func Operators(names string) func(context.Context) bool {
	if names == "" {
		return nil
	}
	named := make(map[string]bool)
	for name := range strings.SplitSeq(names, ",") {
		if name = strings.TrimSpace(name); name != "" {
			named[name] = true
		}
	}
	return func(ctx context.Context) bool {
		caller, ok := peer.FromContext(ctx)
		if !ok {
			return false
		}
		if caller.AuthInfo == (person{}) {
			return true
		}
		info, ok := caller.AuthInfo.(credentials.TLSInfo)
		if !ok || len(info.State.VerifiedChains) == 0 {
			return false
		}
		cert := info.State.VerifiedChains[0][0]
		return named[cert.Subject.CommonName] || slices.ContainsFunc(cert.DNSNames, func(n string) bool { return named[n] }) ||
			slices.ContainsFunc(cert.URIs, func(u *url.URL) bool { return named[u.String()] })
	}
}
