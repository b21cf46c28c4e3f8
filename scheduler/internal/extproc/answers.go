package extproc

import (
	"maps"
	"slices"
	"strings"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	modepb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typepb "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvscout/kvscout/protocol/client"
	"github.com/kvscout/kvscout/scheduler/internal/edge"
)

const (
	// maxChunk bytes of a body in one message: the least that any data plane takes.
	maxChunk = 62000
)

// control are the headers that were for us: they do not reach the engine.
var control = slices.Concat(client.ControlHeaders, rewriteHeaders, []string{edge.ExplainHeader})

// destination is what sends a request where it was decided.
func destination(c *choice) *extproc.CommonResponse {
	set := []*corepb.HeaderValueOption{header(endpointKey, strings.Join(c.endpoints, ","))}
	return &extproc.CommonResponse{
		ClearRouteCache: true,
		HeaderMutation:  &extproc.HeaderMutation{SetHeaders: append(set, headerList(c.headers)...), RemoveHeaders: control},
	}
}

func headerList(headers map[string]string) []*corepb.HeaderValueOption {
	var list []*corepb.HeaderValueOption
	for _, name := range slices.Sorted(maps.Keys(headers)) {
		list = append(list, header(name, headers[name]))
	}
	return list
}

func header(name, value string) *corepb.HeaderValueOption {
	return &corepb.HeaderValueOption{
		Header:       &corepb.HeaderValue{Key: name, RawValue: []byte(value)},
		AppendAction: corepb.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
	}
}

// chosen adds to an answer what was decided, for data planes that read it there.
func chosen(m *extproc.ProcessingResponse, c *choice) *extproc.ProcessingResponse {
	m.DynamicMetadata = &structpb.Struct{Fields: map[string]*structpb.Value{
		namespace: structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{
			endpointKey: structpb.NewStringValue(strings.Join(c.endpoints, ",")),
		}}),
	}}
	return m
}

func requestHeaders(with *extproc.CommonResponse) *extproc.ProcessingResponse {
	return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestHeaders{RequestHeaders: &extproc.HeadersResponse{Response: with}}}
}

// showBodies makes a data plane that was to show none show those of this request.
func showBodies() *extproc.ProcessingResponse {
	return &extproc.ProcessingResponse{ModeOverride: &modepb.ProcessingMode{
		RequestHeaderMode: modepb.ProcessingMode_SEND, RequestBodyMode: duplex, RequestTrailerMode: modepb.ProcessingMode_SEND,
		ResponseHeaderMode: modepb.ProcessingMode_SEND, ResponseBodyMode: duplex, ResponseTrailerMode: modepb.ProcessingMode_SEND,
	}}
}

// bufferedBody leaves the body as it is.
func bufferedBody(with *extproc.CommonResponse) *extproc.ProcessingResponse {
	return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestBody{RequestBody: &extproc.BodyResponse{Response: with}}}
}

func requestChunk(chunk []byte, last bool) *extproc.ProcessingResponse {
	return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestBody{RequestBody: passOn(chunk, last)}}
}

func requestTrailers() *extproc.ProcessingResponse {
	return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestTrailers{RequestTrailers: &extproc.TrailersResponse{}}}
}

// responseHeaders adds what the client is told.
func responseHeaders(told map[string]string) *extproc.ProcessingResponse {
	h := &extproc.HeadersResponse{Response: &extproc.CommonResponse{HeaderMutation: &extproc.HeaderMutation{SetHeaders: headerList(told)}}}
	return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseHeaders{ResponseHeaders: h}}
}

// shortened says that the body's length is not the one that came.
func shortened(m *extproc.ProcessingResponse) *extproc.ProcessingResponse {
	mutation := m.GetResponseHeaders().GetResponse().GetHeaderMutation()
	mutation.RemoveHeaders = append(mutation.RemoveHeaders, "content-length")
	return m
}

// responseChunk lets a piece of the response pass. Where the data plane streams
// in both directions only what is sent back reaches the client.
func responseChunk(chunk []byte, last, duplex bool) *extproc.ProcessingResponse {
	body := &extproc.BodyResponse{}
	if duplex {
		body = passOn(chunk, last)
	}
	return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseBody{ResponseBody: body}}
}

func responseTrailers() *extproc.ProcessingResponse {
	return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extproc.TrailersResponse{}}}
}

func passOn(chunk []byte, last bool) *extproc.BodyResponse {
	return &extproc.BodyResponse{Response: &extproc.CommonResponse{BodyMutation: &extproc.BodyMutation{
		Mutation: &extproc.BodyMutation_StreamedResponse{StreamedResponse: &extproc.StreamedBodyResponse{Body: chunk, EndOfStream: last}},
	}}}
}

// refusal answers in the engine's place.
func refusal(r edge.Refusal) *extproc.ProcessingResponse {
	h := &extproc.HeaderMutation{}
	for _, one := range r.Headers() {
		h.SetHeaders = append(h.SetHeaders, header(one[0], one[1]))
	}
	return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extproc.ImmediateResponse{
		Status: &typepb.HttpStatus{Code: typepb.StatusCode(r.Status)}, Headers: h, Body: r.Body(), Details: "kvscout",
	}}}
}
