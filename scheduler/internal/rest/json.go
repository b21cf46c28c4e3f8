package rest

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"github.com/grpc-ecosystem/grpc-gateway/v2/utilities"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// form of messages: fields have their names in the .proto files, all of them are
// there, and unknown ones are refused, since one that is misspelt would change
// the answer silently.
var form = &jsonForm{runtime.JSONPb{MarshalOptions: protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}}}

type jsonForm struct{ runtime.JSONPb }

// NewDecoder takes a body whole: what stands behind the message is refused.
func (f *jsonForm) NewDecoder(r io.Reader) runtime.Decoder {
	return runtime.DecoderFunc(func(v any) error {
		b, read := r.(*body)
		m, message := v.(proto.Message)
		if !read || !message {
			return fmt.Errorf("%T into %T", r, v)
		}
		if err := f.UnmarshalOptions.Unmarshal(b.text, m); err != nil {
			return plain(err)
		}
		return nil
	})
}

// StreamContentType is that of one message a line.
func (f *jsonForm) StreamContentType(any) string { return "application/x-ndjson" }

// Write answers with a message, in lines for people.
func Write(w http.ResponseWriter, m proto.Message) {
	options := form.MarshalOptions
	options.Multiline = true
	text, err := options.Marshal(m)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", form.ContentType(m))
	_, _ = w.Write(text)
}

// plain is an error of protobuf without the spaces by which it keeps people from
// relying on its text.
func plain(err error) error {
	return fmt.Errorf("%s", bytes.ReplaceAll([]byte(err.Error()), []byte("\u00a0"), []byte(" ")))
}

// body is one that was read.
type body struct{ text []byte }

func (b *body) Read([]byte) (int, error) { return 0, io.EOF }
func (b *body) Close() error             { return nil }

// query is like form for what stands in the URL.
type query struct{ runtime.DefaultQueryParser }

func (q query) Parse(m proto.Message, values url.Values, filter *utilities.DoubleArray) error {
	fields := m.ProtoReflect().Descriptor().Fields()
	for name := range values {
		if fields.ByName(protoreflect.Name(name)) == nil && fields.ByJSONName(name) == nil {
			return fmt.Errorf("unknown parameter %.80q", name)
		}
	}
	return q.DefaultQueryParser.Parse(m, values, filter)
}
