package zmtp

import (
	"fmt"
	"net"
	"strconv"
	"strings"
)

// maxSocketPath is the longest path of a unix socket on Linux.
const maxSocketPath = 107

// Endpoint is a parsed ZeroMQ address.
type Endpoint struct {
	// Network is "tcp" or "unix".
	Network string
	// Host and Port belong to tcp. Host "*" is every interface and port 0 is
	// any free one; both only make sense for listening.
	Host string
	Port int
	// Path belongs to unix: a file, or @name for Linux's abstract namespace.
	Path string
}

// ParseEndpoint reads tcp://host:port, tcp://[ipv6]:port, tcp://*:port and
// ipc://path.
func ParseEndpoint(s string) (Endpoint, error) {
	bad := func(format string, args ...any) (Endpoint, error) {
		return Endpoint{}, fmt.Errorf("endpoint %q: %s", s, fmt.Sprintf(format, args...))
	}
	scheme, rest, found := strings.Cut(s, "://")
	if !found {
		return bad("no transport: want tcp://host:port or ipc://path")
	}
	switch scheme {
	case "tcp":
		if strings.ContainsAny(rest, ";/ \t\r\n") {
			return bad("host and port only, please: no source address, path or space")
		}
		host, portText, err := net.SplitHostPort(rest)
		if err != nil {
			return bad("want host:port, with an IPv6 address in brackets")
		}
		if host == "" {
			return bad("no host: * stands for every interface")
		}
		if portText == "*" {
			portText = "0"
		}
		port, err := strconv.ParseUint(portText, 10, 16)
		if err != nil {
			return bad("port %q is not a number from 0 to 65535", portText)
		}
		return Endpoint{Network: "tcp", Host: host, Port: int(port)}, nil
	case "ipc":
		switch {
		case rest == "" || rest == "@" || rest == "*":
			return bad("want the path of a socket")
		case strings.ContainsRune(rest, 0):
			return bad("path holds a zero byte")
		case len(rest) > maxSocketPath:
			return bad("path is %d bytes long, a unix socket allows %d", len(rest), maxSocketPath)
		}
		return Endpoint{Network: "unix", Path: rest}, nil
	}
	return bad("transport %q is not supported: want tcp or ipc", scheme)
}

// String gives the ZeroMQ form of e.
func (e Endpoint) String() string {
	if e.Network == "unix" {
		return "ipc://" + e.Path
	}
	return "tcp://" + net.JoinHostPort(e.Host, strconv.Itoa(e.Port))
}

// address gives the form that package net wants.
func (e Endpoint) address() string {
	if e.Network == "unix" {
		return e.Path
	}
	host := e.Host
	if host == "*" {
		host = ""
	}
	return net.JoinHostPort(host, strconv.Itoa(e.Port))
}

// dialable says why e cannot be connected to.
func (e Endpoint) dialable() error {
	if e.Network == "tcp" && (e.Host == "*" || e.Port == 0) {
		return fmt.Errorf("endpoint %q: to connect, a host and a port are needed", e)
	}
	return nil
}
