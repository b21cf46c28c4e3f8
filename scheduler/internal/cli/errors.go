package cli

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"syscall"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// reasonOf is the API's reason of an error; empty: it is of no scheduler.
func reasonOf(err error) string {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return info.GetReason()
		}
	}
	return ""
}

// explained is an error as people are told it: one line that ends with what to do.
func (s *session) explained(ctx context.Context, err error) error {
	of, ok := status.FromError(err)
	if err == nil || !ok {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	message := of.Message()
	switch reasonOf(err) {
	case "":
	case "NOT_AN_OPERATOR":
		return fmt.Errorf("the scheduler at %s answers this to operators only: %s", s.scheduler, s.right())
	case "UNKNOWN_MODEL":
		return fmt.Errorf("%s; kvscout members lists who serves what", message)
	case "UNKNOWN_POLICY":
		return fmt.Errorf("%s; docs/POLICIES.md lists them", message)
	case "POLICY_NOT_ALLOWED":
		return fmt.Errorf("%s; the scheduler's -allowed-policies says which are", message)
	case "UNKNOWN_REQUEST":
		return fmt.Errorf("%s: decisions of Pick with a request_id are remembered for ten minutes, by the scheduler that made them", message)
	case "NO_MEMBERS", "MODEL_GONE", "NO_CANDIDATE", "STARTING":
		return fmt.Errorf("%s; kvscout doctor says what to look at", message)
	default:
		return errors.New(message)
	}
	switch of.Code() {
	case codes.Unavailable, codes.DeadlineExceeded:
		if _, why := s.reach(ctx); why != nil {
			return why
		}
		if of.Code() == codes.DeadlineExceeded {
			return fmt.Errorf("the scheduler at %s has not answered within %v (-timeout)", s.scheduler, s.timeout)
		}
		if strings.Contains(message, "server preface") {
			return fmt.Errorf("what listens at %s speaks no gRPC: -scheduler is the scheduler's -grpc-address", s.scheduler)
		}
	case codes.Unimplemented:
		return fmt.Errorf("what answers at %s does not know this call: it is an older scheduler, or none (-scheduler is its -grpc-address)", s.scheduler)
	case codes.PermissionDenied, codes.Unauthenticated:
		return fmt.Errorf("%s refuses the call: %s; a proxy in between may want more", s.scheduler, message)
	}
	return fmt.Errorf("the scheduler at %s: %s", s.scheduler, message)
}

// right says how to get the right to the service Admin.
func (s *session) right() string {
	if s.cert == "" {
		return "show an operator's certificate (-tls-cert, -tls-key), one that the scheduler's -grpc-operators names"
	}
	pair, err := tls.LoadX509KeyPair(s.cert, s.key)
	if err != nil {
		return err.Error()
	}
	names := pair.Leaf.DNSNames
	if cn := pair.Leaf.Subject.CommonName; cn != "" && !slices.Contains(names, cn) {
		names = append([]string{cn}, names...)
	}
	for _, u := range pair.Leaf.URIs {
		names = append(names, u.String())
	}
	return fmt.Sprintf("its -grpc-operators must name one of %s, which %s has", strings.Join(names, ", "), s.cert)
}

// reach connects to the scheduler's address as gRPC does, and says what is
// wrong, and what to do about it. The state is that of TLS, nil without.
func (s *session) reach(ctx context.Context) (*tls.ConnectionState, error) {
	ctx, cancel := context.WithTimeout(ctx, min(s.timeout, 5*time.Second))
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", s.scheduler)
	if err != nil {
		return nil, s.unreached(err)
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline)
	config, err := s.transport()
	if err != nil {
		return nil, err
	}
	if config == nil {
		if speaksTLS(conn) {
			return nil, fmt.Errorf("%s speaks TLS: say by -tls-ca whom to trust, or -tls if the system's CAs do", s.scheduler)
		}
		return nil, nil
	}
	config.NextProtos = []string{"h2"}
	secure := tls.Client(conn, config)
	if err := secure.HandshakeContext(ctx); err != nil {
		return nil, s.mistrusted(err)
	}
	// With TLS 1.3 a server says only behind the handshake what it makes of our
	// certificate. It has nothing else to say but the settings of HTTP/2.
	_ = secure.SetReadDeadline(time.Now().Add(time.Second))
	if _, err := secure.Read(make([]byte, 1)); err != nil && !isTimeout(err) {
		return nil, s.mistrusted(err)
	}
	state := secure.ConnectionState()
	return &state, nil
}

func isTimeout(err error) bool {
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}

// speaksTLS tells whether a TLS handshake is answered by one.
func speaksTLS(conn net.Conn) bool {
	err := tls.Client(conn, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}).Handshake() //nolint:gosec // nothing is said over it
	var remote *net.OpError
	return err == nil || errors.As(err, &remote) && remote.Op == "remote error"
}

func (s *session) unreached(err error) error {
	var name *net.DNSError
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("nobody listens at %s: is the scheduler running, and is -scheduler its -grpc-address?", s.scheduler)
	case errors.As(err, &name):
		return fmt.Errorf("there is no host %q: is -scheduler right?", name.Name)
	case isTimeout(err) || errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s does not answer: is -scheduler right, and may this machine connect to it?", s.scheduler)
	}
	return fmt.Errorf("%s cannot be reached: %w", s.scheduler, err)
}

func (s *session) mistrusted(err error) error {
	var unknown x509.UnknownAuthorityError
	var host x509.HostnameError
	var invalid x509.CertificateInvalidError
	var remote *net.OpError // an alert of the other side
	var record tls.RecordHeaderError
	switch {
	case errors.As(err, &unknown) && s.ca == "":
		return fmt.Errorf("the certificate of %s is signed by no CA of the system: name its CA by -tls-ca", s.scheduler)
	case errors.As(err, &unknown):
		return fmt.Errorf("the certificate of %s is not signed by a CA in %s: -tls-ca must name the CA that signed it", s.scheduler, s.ca)
	case errors.As(err, &host):
		return fmt.Errorf("the certificate of %s is for another name (%w): say that name by -tls-name if you trust it", s.scheduler, host)
	case errors.As(err, &invalid):
		return fmt.Errorf("the certificate of %s is not valid: %w: have it renewed, or see this machine's clock", s.scheduler, invalid)
	case errors.As(err, &remote) && remote.Op == "remote error" && s.cert == "":
		return fmt.Errorf("%s wants a certificate of callers (%w): give one by -tls-cert and -tls-key", s.scheduler, remote.Err)
	case errors.As(err, &remote) && remote.Op == "remote error":
		return fmt.Errorf("%s does not take the certificate %s (%w): it must be signed by the CA of its -grpc-tls-ca, and not have expired", s.scheduler, s.cert, remote.Err)
	case errors.As(err, &record):
		return fmt.Errorf("%s does not speak TLS: leave -tls and the flags that begin so out, or is it another port?", s.scheduler)
	}
	return fmt.Errorf("no TLS with %s: %w", s.scheduler, err)
}
