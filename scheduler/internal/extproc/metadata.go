package extproc

import (
	"net/netip"
	"strings"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/structpb"
)

const (
	// endpointKey names the endpoint in a header of the request and in dynamic
	// metadata, under namespace.
	endpointKey = "x-gateway-destination-endpoint"
	namespace   = "envoy.lb"
	// servedKey names the endpoint that answered.
	servedKey = "x-gateway-destination-endpoint-served"
	// subsetKey lists the only endpoints that are allowed.
	subsetKey       = "x-gateway-destination-endpoint-subset"
	subsetNamespace = "envoy.lb.subset_hint"
	// attributes of the filter that tell more of the upstream.
	attributes = "envoy.filters.http.ext_proc"
)

// subset are the only endpoints that are allowed: host:port, or a host with all
// of its ports.
type subset struct {
	given bool
	list  []string
}

func subsetOf(m *corepb.Metadata) subset {
	v, ok := m.GetFilterMetadata()[subsetNamespace].GetFields()[subsetKey]
	if !ok {
		return subset{}
	}
	return subset{given: true, list: appendEndpoints(nil, v)}
}

// appendEndpoints reads a list, a text with commas, or a list of such texts.
func appendEndpoints(list []string, v *structpb.Value) []string {
	for _, one := range v.GetListValue().GetValues() {
		if _, nested := one.GetKind().(*structpb.Value_ListValue); !nested {
			list = appendEndpoints(list, one)
		}
	}
	for one := range strings.SplitSeq(v.GetStringValue(), ",") {
		if one = strings.TrimSpace(one); one != "" {
			list = append(list, one)
		}
	}
	return list
}

// among returns the addresses that are in the subset.
func (s subset) among(addresses []string) []string {
	in := make(map[string]bool, len(s.list))
	for _, one := range s.list {
		in[one] = true
	}
	var list []string
	for _, a := range addresses {
		if host := hostOf(a); in[a] || in[host] || in[strings.Trim(host, "[]")] {
			list = append(list, a)
		}
	}
	return list
}

// hostOf an address, in brackets if it stands so there.
func hostOf(address string) string {
	if i := strings.LastIndexByte(address, ':'); i >= 0 {
		return address[:i]
	}
	return address
}

// numeric tells whether an endpoint is written as who answered will be.
func numeric(endpoint string) bool {
	_, err := netip.ParseAddrPort(endpoint)
	return err == nil
}

// servedBy is the endpoint that answered; empty: nobody says.
func servedBy(m *extproc.ProcessingRequest) string {
	if s := m.GetMetadataContext().GetFilterMetadata()[namespace].GetFields()[servedKey].GetStringValue(); s != "" {
		return s
	}
	return m.GetAttributes()[attributes].GetFields()["upstream.address"].GetStringValue()
}

// gaveUp tells whether an answer is the data plane's own because time ran out: no
// failure of the engine's.
func gaveUp(m *extproc.ProcessingRequest) bool {
	switch m.GetAttributes()[attributes].GetFields()["response.code_details"].GetStringValue() {
	case "stream_idle_timeout", "max_duration_timeout", "request_overall_timeout", "downstream_remote_disconnect":
		return true
	}
	return false
}

// headersOf returns headers by name; of equal names the first.
func headersOf(h *corepb.HeaderMap) map[string]string {
	headers := make(map[string]string, len(h.GetHeaders()))
	for _, one := range h.GetHeaders() {
		if _, ok := headers[one.GetKey()]; ok {
			continue
		}
		if v := one.GetRawValue(); len(v) > 0 {
			headers[one.GetKey()] = string(v)
		} else {
			headers[one.GetKey()] = one.GetValue()
		}
	}
	return headers
}
