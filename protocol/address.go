package protocol

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// Address is where requests to a member are sent: host:port, and nothing that
// somebody could read otherwise.
type Address struct {
	// IP of the host, or invalid: the host is Name, in lower case.
	IP   netip.Addr
	Name string
	Port uint16
}

// ParseAddress reads an address as members announce it: an IP address, IPv6 in
// brackets, or a DNS name, and a port from 1 to 65535. There is no user, path,
// scheme or zone in it, no name that some resolvers take for a number, and no
// IP address that is nobody's or a group's.
func ParseAddress(text string) (Address, error) {
	host, digits, err := net.SplitHostPort(text)
	if err != nil {
		return Address{}, fmt.Errorf("address %.80q is not host:port", text)
	}
	port, err := strconv.ParseUint(digits, 10, 16)
	if err != nil || port == 0 || digits[0] == '0' {
		return Address{}, fmt.Errorf("address %.80q: the port must be a number from 1 to 65535", text)
	}
	a := Address{Port: uint16(port)}
	if a.IP, err = netip.ParseAddr(host); err != nil {
		a.IP = netip.Addr{}
		if strings.HasPrefix(text, "[") {
			return Address{}, fmt.Errorf("address %.80q: no IPv6 address in the brackets", text)
		}
		a.Name = strings.ToLower(host)
		if err := checkHost(a.Name); err != nil {
			return Address{}, fmt.Errorf("address %.80q: %w", text, err)
		}
		return a, nil
	}
	switch {
	case a.IP.Zone() != "":
		return Address{}, fmt.Errorf("address %.80q: a zone counts on one machine only", text)
	case a.IP.Is4In6():
		return Address{}, fmt.Errorf("address %.80q: write IPv4 addresses as such", text)
	case a.IP.IsUnspecified(), a.IP.IsMulticast(), a.IP == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return Address{}, fmt.Errorf("address %.80q is that of no single host", text)
	}
	return a, nil
}

// checkHost accepts DNS names as they are used, underscores included.
func checkHost(name string) error {
	if len(name) > 253 {
		return fmt.Errorf("a name of %d bytes, at most 253", len(name))
	}
	last := ""
	for label := range strings.SplitSeq(strings.TrimSuffix(name, "."), ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
			return errors.New("the host is neither an IP address nor a DNS name")
		}
		if strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return errors.New("the host is neither an IP address nor a DNS name")
		}
		last = label
	}
	// 127.1, 2130706433 and 0x7f.1 are addresses to some and names to others.
	if strings.Trim(last, "0123456789") == "" || strings.HasPrefix(last, "0x") {
		return errors.New("the host is a number and no IP address")
	}
	return nil
}

// Loopback tells whether the address is that of whoever uses it.
func (a Address) Loopback() bool {
	return a.IP.IsLoopback() || a.Name == "localhost" || strings.HasSuffix(a.Name, ".localhost")
}
