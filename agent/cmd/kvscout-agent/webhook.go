package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"

	"github.com/kvscout/kvscout/agent/internal/inject"
	"github.com/kvscout/kvscout/agent/internal/webhook"
	"github.com/kvscout/kvscout/protocol/kube"
	"github.com/kvscout/kvscout/protocol/settings"
)

const webhookIntro = `kvscout-agent webhook puts an agent beside each vLLM engine of the pods that
Kubernetes asks it about, as kvscout-agent inject does in files. It refuses no
pod. deploy/kustomize installs it; docs/KUBERNETES.md says how pods are chosen.

Its certificates it makes and renews itself. They are kept in the Secret of
-secret, and made trusted in the MutatingWebhookConfiguration of -configuration;
its service account may read and change these two objects, and no others.

Exit status: 0 after SIGINT or SIGTERM, 1 on failure, 2 for wrong usage.

`

func runWebhook(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	program := &settings.Program{Name: "kvscout-agent webhook", Intro: webhookIntro}
	fs := flag.NewFlagSet(program.Name, flag.ContinueOnError)
	s := injectFlags(fs)
	cfg := webhook.Config{Version: settings.Built().Version}
	fs.StringVar(&cfg.Address, "address", "0.0.0.0:9443", "`host:port` for the API server, with TLS")
	fs.StringVar(&cfg.AdminAddress, "admin-address", "127.0.0.1:9478", "`host:port` for /healthz, /readyz and /metrics")
	fs.StringVar(&cfg.Kubernetes, "kubernetes", "", "`URL` of Kubernetes' API server; empty: that of the cluster it runs in")
	fs.StringVar(&cfg.ServiceAccount, "service-account", kube.ServiceAccount, "`folder` with token, ca.crt and namespace of the service account")
	fs.StringVar(&cfg.Service, "service", "kvscout-webhook", "`name` of the Service that leads to -address")
	fs.StringVar(&cfg.Secret, "secret", "kvscout-webhook", "`name` of the Secret for certificates, in the same namespace")
	fs.StringVar(&cfg.Configuration, "configuration", "kvscout", "`name` of the MutatingWebhookConfiguration")
	err := program.Read(fs, args, getenv, stdout, stderr)
	if err == nil {
		err = errors.Join(s.Validate(), completeWebhook(fs, &cfg, getenv))
	}
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "%s: %v\n", program.Name, err)
		return 2
	}
	program.Start(settings.Effective(fs, func(_, value string) string { return settings.RedactURLs(value) }))
	cfg.Log = program.Log
	cfg.Decide = func(pod inject.Pod) inject.Decision { return inject.Decide(pod, "", *s) }
	server, err := webhook.New(cfg)
	if err == nil {
		err = server.Run(ctx)
	}
	if err != nil {
		program.Log.Error("webhook ended", "error", err)
		return 1
	}
	return 0
}

// completeWebhook finds the cluster's API server, and names what is wrong.
func completeWebhook(fs *flag.FlagSet, cfg *webhook.Config, getenv func(string) string) error {
	var errs []error
	var err error
	if cfg.Kubernetes, err = kube.Discover(cfg.Kubernetes, getenv); err != nil {
		errs = append(errs, settings.Wrong(fs, "kubernetes", "%v", err))
	}
	for _, a := range []struct{ name, value string }{{"address", cfg.Address}, {"admin-address", cfg.AdminAddress}} {
		if _, _, err := net.SplitHostPort(a.value); err != nil {
			errs = append(errs, settings.Wrong(fs, a.name, "%v", err))
		}
	}
	for _, n := range []struct{ name, value string }{{"service", cfg.Service}, {"secret", cfg.Secret}, {"configuration", cfg.Configuration}} {
		if !inject.IsName(n.value) {
			errs = append(errs, settings.Wrong(fs, n.name, "%.80q is no name of an object of Kubernetes", n.value))
		}
	}
	return errors.Join(errs...)
}
