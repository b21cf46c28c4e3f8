package agent

import (
	"strings"
	"testing"
)

func TestValidateNamesEverything(t *testing.T) {
	err := Config{
		Engine: "localhost", Events: "udp://x", Replay: "tcp://*:1", Pool: "a.b", Address: "here", AdminAddress: "9", BlockSize: -1, Heartbeat: 1, Probe: 1, Labels: map[string]string{roleLabel: "cook"},
	}.Validate()
	if err == nil {
		t.Fatal("valid")
	}
	for _, key := range []string{"-nats-url", "-engine", "-events", "-replay", "-pool", "-address", "-admin-address", "-block-size", "-heartbeat", "-probe", "-label"} {
		if !strings.Contains(err.Error(), key+", KVSCOUT_") {
			t.Errorf("%s is not named in\n%v", key, err)
		}
	}
	secret := Config{NATSURL: "nats://user:s3cret@host:4222,ftp://x:s3cret@y", Engine: "ftp://x:s3cret@y"}.Validate()
	if secret == nil || strings.Contains(secret.Error(), "s3cret") {
		t.Errorf("the password is quoted, or nothing is wrong: %v", secret)
	}
	for _, good := range []Config{
		{NATSURL: "nats://a:1, tls://b:2"},
		{NATSURL: "nats://a:1", Events: "tcp://*:5557", EventsBind: true, Replay: NoReplay},
		{NATSURL: "nats://a:1", Events: "ipc:///tmp/x", Replay: "ipc:///tmp/y", AdminAddress: ":0", Address: "[::1]:8000"},
	} {
		if err := good.Validate(); err != nil {
			t.Errorf("%+v: %v", good, err)
		}
	}
}

func TestMemberNames(t *testing.T) {
	for _, c := range []struct {
		cfg  Config
		rank int
		want string
	}{
		{Config{Namespace: "prod", PodUID: "a1-b2"}, 3, "prod_a1-b2_3"},
		{Config{Namespace: "my_ns.x", PodUID: "pod.with dots*>"}, 0, "my-ns-x-4430f757_pod-with-dots---a7bdf395_0"},
		{Config{Pod: "host"}, 0, "default_host_0"},
	} {
		got, err := c.cfg.withDefaults().member(c.rank)
		if got != c.want || err != nil {
			t.Errorf("%+v: %q, %v", c.cfg, got, err)
		}
	}
	a := Config{Engine: "http://127.0.0.1:8000"}.withDefaults()
	b := Config{Engine: "http://127.0.0.1:8001", PodIP: "10.0.0.1"}.withDefaults()
	if a.Pod == b.Pod || b.Address != "10.0.0.1:8001" {
		t.Errorf("two engines of a host: %q and %q at %q", a.Pod, b.Pod, b.Address)
	}
}
