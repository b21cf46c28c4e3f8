package cli

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
	"github.com/kvscout/kvscout/protocol/settings"
	"github.com/kvscout/kvscout/protocol/tlsclient"
)

// maxMessage admits the answer about any fleet, and any prompt that is taken.
const maxMessage = 32 << 20

// options that every command has which asks a scheduler.
type options struct {
	scheduler string // host:port
	tls       bool
	ca, cert  string // files
	key, name string
	timeout   time.Duration
	output    string
}

func (o *options) bind(fs *flag.FlagSet) {
	fs.StringVar(&o.scheduler, "scheduler", "127.0.0.1:50051", "`host:port` of the scheduler's gRPC API")
	fs.BoolVar(&o.tls, "tls", false, "use TLS; so does each of the next four")
	fs.StringVar(&o.ca, "tls-ca", "", "`file` with the CA of the scheduler's certificate; empty: the system's")
	fs.StringVar(&o.cert, "tls-cert", "", "`file` with our certificate, where callers need one")
	fs.StringVar(&o.key, "tls-key", "", "`file` with the private key of -tls-cert")
	fs.StringVar(&o.name, "tls-name", "", "`name` that the scheduler's certificate has, where it is reached by another, as through a forwarded port")
	fs.DurationVar(&o.timeout, "timeout", 10*time.Second, "longest `time` to wait for an answer")
	fs.StringVar(&o.output, "o", "table", "`form` of the output: table or json")
}

func (o *options) validate(fs *flag.FlagSet) error {
	switch {
	case o.output != "table" && o.output != "json":
		return settings.Wrong(fs, "o", "%q is neither table nor json", o.output)
	case o.timeout < 0:
		return settings.Wrong(fs, "timeout", "must not be negative")
	case (o.cert == "") != (o.key == ""):
		return misused("-tls-cert and -tls-key: one without the other is of no use")
	}
	if host, port, err := net.SplitHostPort(o.scheduler); err != nil || host == "" || port == "" {
		return settings.Wrong(fs, "scheduler", "%q is not like host:port", o.scheduler)
	}
	o.tls = o.tls || o.ca != "" || o.cert != "" || o.name != ""
	return nil
}

// transport is how the scheduler is spoken to; nil: in plain text.
func (o *options) transport() (*tls.Config, error) {
	if !o.tls {
		return nil, nil
	}
	host, _, _ := net.SplitHostPort(o.scheduler)
	c, err := tlsclient.Trust{CA: o.ca, Name: cmp.Or(o.name, host)}.Config()
	if err != nil {
		return nil, fmt.Errorf("-tls-ca: %w", err)
	}
	if o.cert != "" {
		pair, err := tls.LoadX509KeyPair(o.cert, o.key)
		if err != nil {
			return nil, fmt.Errorf("-tls-cert and -tls-key: %w", err)
		}
		// Shown whatever authorities the server names: it says then what is wrong.
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	}
	return c, nil
}

// session is one run of a command.
type session struct {
	IO
	options
	args    []string // behind the flags
	colours bool

	conn   *grpc.ClientConn
	client api.SchedulerClient
	admin  api.AdminClient
}

// dial makes the clients. They connect when they are first used.
func (s *session) dial() error {
	c, err := s.transport()
	if err != nil {
		return err
	}
	safe := insecure.NewCredentials()
	if c != nil {
		safe = credentials.NewTLS(c)
	}
	s.conn, err = grpc.NewClient("dns:///"+s.scheduler, grpc.WithTransportCredentials(safe), grpc.WithUserAgent("kvscout"),
		grpc.WithDefaultCallOptions(grpc.MaxCallSendMsgSize(maxMessage), grpc.MaxCallRecvMsgSize(maxMessage)))
	if err != nil {
		return fmt.Errorf("-scheduler: %w", err)
	}
	s.client, s.admin = api.NewSchedulerClient(s.conn), api.NewAdminClient(s.conn)
	return nil
}

// bounded is the time of one call.
func (s *session) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, s.timeout)
}

// list asks for the members.
func (s *session) list(ctx context.Context, model string) (*api.ListMembersResponse, error) {
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	return s.admin.ListMembers(ctx, &api.ListMembersRequest{Model: model})
}

// json writes a message as HTTP/JSON has it, indented.
func (s *session) json(m proto.Message) error {
	text, err := protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}.Marshal(m)
	if err != nil {
		return err
	}
	var whole bytes.Buffer
	if err := json.Indent(&whole, text, "", "  "); err != nil {
		return err
	}
	whole.WriteByte('\n')
	_, err = s.Out.Write(whole.Bytes())
	return err
}
